"""`coordinator init` and `invite` say where silos of other machines will not find the coordinator, and what mends it.

And where a browser finds its status page.
"""

import re
import socket
from pathlib import Path

import pytest

from lorica_coordinator.cli import main
from lorica_coordinator.edges.check import told_address
from lorica_coordinator.settings import STATUS_PORT, Settings
from lorica_security.errors import ConfigurationError
from tests.support.command_line import Done, run_command

REMEDY = ("[public] hosts", "--host")


@pytest.fixture(autouse=True)
def settings_of_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def made(tmp_path: Path, *words: str) -> tuple[Done, Done]:
    """What `init` and then `invite` say."""
    folder = tmp_path / "coordinator"
    first = run_command(main, "init", folder, "--no-plan", "--federation", "north", *words)
    assert first.code == 0, first.err
    second = run_command(main, "invite", "hospital-a", "--dir", folder)
    assert second.code == 0, second.err
    assert re.fullmatch(r"lorica1-[\w-]+\n", second.out)  # the token, and nothing else
    return first, second


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("0.0.0.0", "no address to connect to"),
        ("no-such-host.invalid", "does not resolve"),
    ],
)
def test_both_warn_of_a_host_that_is_nobodys_elsewhere(tmp_path: Path, host: str, why: str) -> None:
    for done in made(tmp_path, "--host", host):
        for words in (f"warning: silos are told to connect to {host}, port", why, *REMEDY):
            assert words in done.err


@pytest.mark.parametrize("name", ["box", "box.local", "box.localdomain"])
def test_both_warn_of_a_name_that_was_guessed_and_is_known_here_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    monkeypatch.setattr(told_address.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("192.0.2.7", 0))])
    for done in made(tmp_path):
        for words in (f"connect to {name}, port", "machines elsewhere may not know", *REMEDY):
            assert words in done.err


def test_a_name_that_does_not_resolve_is_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "no-such-host.invalid")
    for done in made(tmp_path):
        assert "connect to localhost, port" in done.err


def test_neither_warns_of_a_name_that_may_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_address.socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("192.0.2.7", 0))])
    first, second = made(tmp_path, "--host", "fl.example.org")
    assert first.err == ""
    assert "warning" not in second.err


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_whoever_asks_for_this_machine_alone_is_not_warned_of_it(tmp_path: Path, host: str) -> None:
    for done in made(tmp_path, "--host", host):
        assert "warning" not in done.err
    settings = tmp_path / "coordinator" / "federation.toml"
    settings.write_text(settings.read_text().replace(f'hosts = ["{host}"]', 'hosts = ["no-such-host.invalid"]'))
    assert "does not resolve" in run_command(main, "invite", "bank-b", "--dir", tmp_path / "coordinator").err


def test_a_host_of_this_machine_beside_another_name_is_warned_of(tmp_path: Path) -> None:
    for done in made(tmp_path, "--host", "localhost", "--host", "fl.example.org"):
        assert "leads each machine to itself" in done.err


def test_a_federation_of_one_machine_is_not_warned_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda: "no-such-host.invalid")
    made(tmp_path)
    settings = tmp_path / "coordinator" / "federation.toml"
    settings.write_text(settings.read_text().replace("0.0.0.0", "127.0.0.1"))
    done = run_command(main, "invite", "bank-b", "--dir", tmp_path / "coordinator")
    assert (done.code, "warning" in done.err) == (0, False)


def test_the_status_page_may_be_elsewhere_where_it_asks_for_its_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    made(tmp_path, "--status-host", "192.0.2.7", "--status-token-file", str(token))
    listen = Settings.read(tmp_path / "coordinator" / "federation.toml").listen
    assert (listen.status, listen.status_token_file) == (f"192.0.2.7:{STATUS_PORT}", str(token))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_a_token_is_refused_where_nobody_would_be_asked_for_it(tmp_path: Path, host: str) -> None:
    folder = tmp_path / "coordinator"
    words = ("--status-host", host, "--status-token-file", tmp_path / "token")
    run_command(main, "init", folder, "--no-plan", *words).is_refusal(ConfigurationError, host, "--status-host")
    assert not folder.exists()
