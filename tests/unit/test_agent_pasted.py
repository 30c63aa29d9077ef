"""A token by stdin is taken as it is pasted: in one line or several, and nothing is waited for once it is whole."""

import io
from pathlib import Path

import pytest

from lorica_security.errors import ConfigurationError
from lorica_security.identity.enrolment_token import encode
from silo_agent.cli import main
from silo_agent.edges.console.pasted import pasted_token
from tests.support.command_line import run_command
from tests.unit.test_pki_enrolment_token import TEXT, token


@pytest.mark.parametrize(
    "pasted", [TEXT, f"\n{TEXT}\n", f"{TEXT[:50]}\n{TEXT[50:]}\n", f"> {TEXT[:50]}\r\n> {TEXT[50:]}\r\n"]
)
def test_the_lines_of_a_token_are_put_together(pasted: str) -> None:
    assert pasted_token(io.StringIO(pasted)) == token()


def test_what_follows_a_whole_token_is_left_in_the_pipe() -> None:
    source = io.StringIO(f"{TEXT[:50]}\n{TEXT[50:]}\nmore\n")
    assert pasted_token(source) == token()
    assert source.read() == "more\n"


@pytest.mark.parametrize("wrong", ["", "\n\n", f"{TEXT[:50]}\n\n{TEXT[50:]}", "lorica1-abc\n"])
def test_an_empty_line_or_the_end_makes_an_end(wrong: str) -> None:
    with pytest.raises(ConfigurationError, match="copy the whole line"):
        pasted_token(io.StringIO(wrong))


def test_lines_without_end_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="too long"):
        pasted_token(io.StringIO("lorica1-AAAA\n" * 100_000))


def said(tmp_path: Path, *words: str) -> str:
    done = run_command(main, "enroll", *words, "--dir", tmp_path / "silo")
    assert done.code
    return done.err


def test_a_token_in_pieces_on_the_command_line_is_one_token(tmp_path: Path) -> None:
    """It is known again by its expiry, which is long past."""
    whole = encode(token(host="localhost", port=1))
    assert "expired" in said(tmp_path, whole)
    assert said(tmp_path, whole[:40], whole[40:90], whole[90:]) == said(tmp_path, whole)
