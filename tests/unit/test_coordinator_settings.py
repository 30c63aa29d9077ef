"""federation.toml: the template is the defaults, and a refusal names file, key and value."""

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from lorica_coordinator.edges.database.sealing.key_vault import FOLDER
from lorica_coordinator.edges.models.spool import SPOOLS
from lorica_coordinator.settings import Settings, settings_text
from lorica_security.daemon.listen_address import Address, address
from lorica_security.errors import ConfigurationError


def test_template_is_the_defaults() -> None:
    text = settings_text("health-net", ["localhost"])
    assert Settings.parse(text, "federation.toml") == Settings(federation="health-net")


def test_template_explains_every_key() -> None:
    text = settings_text("health-net", ["localhost"])
    parsed = tomllib.loads(text)

    def check(model: type[BaseModel], values: dict[str, object]) -> None:
        assert set(values) == set(model.model_fields)
        for name, field in model.model_fields.items():
            kind = field.annotation
            value = values[name]
            if isinstance(value, dict):
                assert isinstance(kind, type)
                assert issubclass(kind, BaseModel)
                check(kind, value)

    check(Settings, parsed)
    unexplained = [
        paragraph
        for paragraph in re.sub(r"^\[[a-z]+\]\n", "", text, flags=re.MULTILINE).split("\n\n")
        if paragraph.strip() and not paragraph.startswith("#")
    ]
    assert not unexplained


def test_ports_are_those_that_the_documentation_names() -> None:
    settings = Settings(federation="health-net")
    assert settings.listen.silos == "0.0.0.0:7443"
    assert settings.listen.enrolment == "0.0.0.0:7444"
    assert settings.listen.metrics == "127.0.0.1:9464"
    assert (settings.public_silos_port, settings.public_enrolment_port) == (7443, 7444)


def test_init_writes_name_and_hosts(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(settings_text("health-net", ["coordinator.example.org", "10.0.0.7"]))
    settings = Settings.read(path)
    assert settings.federation == "health-net"
    assert settings.public.hosts == ["coordinator.example.org", "10.0.0.7"]
    assert settings.state_folder == tmp_path / "state"


def test_public_ports_may_differ_from_those_listened_on() -> None:
    text = '[public]\nsilos_port = 443\n[listen]\nenrolment = "[::1]:9000"\n'
    settings = Settings.parse('federation = "f"\n' + text, "federation.toml")
    assert (settings.public_silos_port, settings.public_enrolment_port) == (443, 9000)


def test_absolute_state_folder_stays(tmp_path: Path) -> None:
    path = tmp_path / "federation.toml"
    path.write_text('federation = "f"\nstate = "/var/lib/lorica"\n')
    assert Settings.read(path).state_folder == Path("/var/lib/lorica")


def test_lifetimes_have_their_units() -> None:
    text = 'federation = "f"\n[certificates]\nsilo_lifetime_days = 0.5\n[invitations]\nvalidity_hours = 2\n'
    settings = Settings.parse(text, "federation.toml")
    assert settings.certificates.silo_lifetime.total_seconds() == 43_200
    assert settings.invitations.validity_s == 7200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "key federation is missing"),
        ('federation = "Bad Name"', "federation = 'Bad Name'"),
        ('federation = "f"\nport = 1', "unknown key port: remove it or correct its spelling"),
        ('federation = "f"\n[listen]\nsilo = "x"', "unknown key listen.silo"),
        ('federation = "f"\n[listen]\nsilos = "7443"', "listen.silos = '7443': use ADDRESS:PORT"),
        ('federation = "f"\n[listen]\nmetrics = "127.0.0.1:70000"', "listen.metrics = '127.0.0.1:70000'"),
        ('federation = "f"\n[public]\nhosts = []', "public.hosts = []"),
        ('federation = "f"\n[public]\nhosts = ["a b"]', "'a b' is not a host name"),
        ('federation = "f"\n[public]\nhosts = ["a.org:7443"]', "'a.org:7443' is not a host name"),
        ('federation = "f"\n[certificates]\nsilo_lifetime_days = 0', "certificates.silo_lifetime_days = 0"),
        ('federation = "f"\n[invitations]\nvalidity_hours = 99999', "invitations.validity_hours = 99999"),
        ('federation = "f"\n[aggregation]\ndevice = "gpu"', "aggregation.device = 'gpu'"),
        ('federation = "f"\n[aggregation]\nthreads = "2"', "aggregation.threads = '2'"),
        ("federation = ", "is not TOML"),
    ],
)
def test_bad_value_is_refused_with_file_key_and_value(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "federation.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        Settings.read(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is missing: make it with coordinator init"):
        Settings.read(tmp_path / "federation.toml")


def with_keys_at(folder: Path, place: str) -> Settings:
    database = "postgresql+psycopg://o@/l?host=/run"
    text = f'federation = "f"\n[storage]\ndatabase = "{database}"\nattempt_keys = "{place}"\n'
    (folder / "federation.toml").write_text(text)
    return Settings.read(folder / "federation.toml")


@pytest.mark.parametrize("missing", [False, True], ids=["there", "not made yet"])
@pytest.mark.parametrize(
    ("place", "refused"),
    [
        (f"state/{FOLDER}/shared", FOLDER),
        (f"state/{FOLDER}/deep/er", FOLDER),
        (f"elsewhere/../state/{FOLDER}/shared", FOLDER),
        ("to-keys/shared", FOLDER),
        ("to-state", FOLDER),
        (f"to-state/{FOLDER}/shared", FOLDER),
        ("state", FOLDER),
        ("", FOLDER),
        ("/", FOLDER),
        (f"state/{SPOOLS}", SPOOLS),
        (f"state/{SPOOLS}/plan", SPOOLS),
        (f"to-state/{SPOOLS}/plan", SPOOLS),
        (f"state/{FOLDER}", None),
        ("to-keys", None),
        (f"state/{FOLDER}-shared", None),
        ("state/shared", None),
        ("elsewhere", None),
        ("stat", None),
    ],
)
def test_keys_that_several_see_lie_in_no_folder_that_is_cleared(
    tmp_path: Path, place: str, refused: str | None, missing: bool
) -> None:
    (tmp_path / "to-state").symlink_to("state")
    (tmp_path / "to-keys").symlink_to(tmp_path / "to-state" / FOLDER)
    if not missing:
        for folder in (FOLDER, SPOOLS):
            (tmp_path / "state" / folder).mkdir(parents=True)
    whole = str(tmp_path / place) if place != "/" else place
    if refused is None:
        assert with_keys_at(tmp_path, whole).storage.attempt_keys == whole
    else:
        said = f"attempt_keys = {whole!r} is in {tmp_path / 'state' / refused}, or that is in it: keys in use would be"
        with pytest.raises(ConfigurationError, match=re.escape(said)):
            with_keys_at(tmp_path, whole)


def test_links_that_go_in_circles_are_no_place_below_the_keys(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    assert with_keys_at(tmp_path, f"{tmp_path}/one/keys").storage.attempt_keys


@pytest.mark.parametrize("names", [("Bad", ["localhost"]), ("f", ['a"]\nstate = "/etc'])])
def test_init_refuses_names_that_are_not_names(names: tuple[str, list[str]]) -> None:
    with pytest.raises(ConfigurationError):
        settings_text(*names)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:7443", Address("0.0.0.0", 7443)),
        ("[::1]:0", Address("::1", 0)),
        ("coordinator.example:65535", Address("coordinator.example", 65_535)),
    ],
)
def test_addresses(text: str, expected: Address) -> None:
    assert address(text) == expected


@pytest.mark.parametrize("text", ["", ":7443", "host", "host:", "::1:7443", "host:7443x", "host:99999", "a b:1"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match="use ADDRESS:PORT"):
        address(text)
