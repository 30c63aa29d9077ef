"""Which databases federation.toml may name: what leads elsewhere or in clear is refused, and no password is shown.

What somebody chooses who can edit the address, or hand it over: every part of the URL, each parameter, how often it
stands there, and the file's mode.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_coordinator.cli import main as coordinator
from lorica_coordinator.edges.database.open_store import require_sqlite, server_of
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.settings import Settings
from lorica_security.daemon.listen_address import is_loopback
from lorica_security.errors import EXIT_CODES, ConfigurationError
from tests.support.command_line import run_command

SECRET = "hunter2secret"
VERIFIED = "sslmode=verify-full&sslrootcert=/etc/ssl/root.pem"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "federation.toml"
    path.write_text('federation = "clinics"\n')
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("address", "host", "name"),
    [
        ("lorica@/state?host=/run/postgresql", "/run/postgresql", "postgresql:///state"),
        ("lorica@localhost/state", "localhost", "postgresql://localhost/state"),
        ("lorica@127.0.0.1:5433/state", "127.0.0.1", "postgresql://127.0.0.1:5433/state"),
        (f"lorica@db.example.org:5433/state?{VERIFIED}", "db.example.org", "postgresql://db.example.org:5433/state"),
        (f"lorica:{SECRET}@db.example.org/state?{VERIFIED}", "db.example.org", "postgresql://db.example.org/state"),
    ],
)
def test_a_place_that_is_taken(address: str, host: str, name: str, file: Path) -> None:
    place = DatabasePlace.parse(f"postgresql+psycopg://{address}", file)
    assert (place.host, place.name) == (host, name)
    assert SECRET not in repr(place)
    assert place.parameters["hostaddr"] == "", "nor does $PGHOSTADDR lead elsewhere"
    assert place.parameters["gssencmode"] == "disable", "else a Kerberos ticket takes the place of TLS"
    if "verify-full" in address:
        assert (place.parameters["sslmode"], place.parameters["sslrootcert"]) == ("verify-full", "/etc/ssl/root.pem")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nothing of the kind", "is no address of a database: use postgresql"),
        ("sqlite:///state.sqlite", "is of the kind 'sqlite': use postgresql"),
        ("postgresql://lorica@localhost/state", "is of the kind 'postgresql': use postgresql"),
        ("postgresql+psycopg://localhost/state", "names no user or no database"),
        ("postgresql+psycopg://lorica@localhost", "names no user or no database"),
        ("postgresql+psycopg://lorica@/state", "names no host, or two"),
        ("postgresql+psycopg://lorica@localhost/state?host=db.example.org", "names no host, or two"),
        ("postgresql+psycopg://lorica@/state?host=localhost,db.example.org", "is not one host name"),
        ("postgresql+psycopg://lorica@localhost/state?hostaddr=10.0.0.1", "has the parameter 'hostaddr'"),
        ("postgresql+psycopg://lorica@localhost/state?service=other", "has the parameter 'service'"),
        ("postgresql+psycopg://lorica@localhost/state?options=-csearch_path%3Dx", "has the parameter 'options'"),
        (f"postgresql+psycopg://lorica@localhost/state?password={SECRET}", "has the parameter 'password'"),
        ("postgresql+psycopg://lorica@localhost/state?sslmode=disable&sslmode=prefer", "'sslmode', or has it twice"),
        ("postgresql+psycopg://lorica@db.example.org/state", "is on another machine, with no sslmode"),
        ("postgresql+psycopg://lorica@db.example.org/state?sslmode=require", "with sslmode=require"),
        ("postgresql+psycopg://lorica@db.example.org/state?sslmode=verify-ca&sslrootcert=/r", "with sslmode=verify-ca"),
        ("postgresql+psycopg://lorica@db.example.org/state?sslmode=verify-full", "with no root certificate"),
        ("postgresql+psycopg://lorica@10.0.0.7/state?sslrootcert=/r", "add sslmode=verify-full and sslrootcert="),
        ("postgresql+psycopg://lorica@h/state?sslmode=verify-full&sslrootcert=root.pem", "is no path from / on"),
    ],
)
def test_a_place_that_is_refused_with_the_remedy(address: str, said: str, file: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        DatabasePlace.parse(address, file)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)
    assert "[storage] database" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_password_in_a_file_that_others_can_read_is_refused(mode: int, file: Path) -> None:
    file.chmod(mode)
    address = f"postgresql+psycopg://lorica:{SECRET}@localhost/state"
    with pytest.raises(
        ConfigurationError, match=f"has mode {mode:04o}, and a password .*chmod 600.*passfile="
    ) as caught:
        DatabasePlace.parse(address, file)
    assert SECRET not in str(caught.value)
    DatabasePlace.parse("postgresql+psycopg://lorica@localhost/state?passfile=/etc/lorica/pgpass", file)


def test_a_password_in_a_command_line_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"^--database has a password, .*passfile=/PATH") as caught:
        DatabasePlace.parse(f"postgresql+psycopg://lorica:{SECRET}@localhost/state", None)
    assert SECRET not in str(caught.value)
    assert DatabasePlace.parse("postgresql+psycopg://lorica@localhost/state", None).host == "localhost"


def test_init_makes_nothing_where_the_database_is_refused_and_names_it_where_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "net"
    refused = run_command(coordinator, "init", folder, "--no-plan", "--database", "sqlite:///state.sqlite")
    assert (refused.code, folder.exists()) == (EXIT_CODES[ConfigurationError], False)
    assert "--database is of the kind 'sqlite'" in refused.err
    url = "postgresql+psycopg://lorica@/lorica?host=/run/postgresql&passfile=/run/secrets/database-passfile"
    done = run_command(coordinator, "init", folder, "--no-plan", "--host", "localhost", "--database", url)
    assert done.code == 0, done.err
    assert Settings.read(folder / "federation.toml").storage.database == url
    assert not list((folder / "state").glob("*.sqlite*"))


HOSTS = st.sampled_from(
    [
        "localhost",
        "127.0.0.1",
        "127.9.9.9",
        "%5B::1%5D",
        "[::1]",
        "db",
        "LOCALHOST",
        "localhost.",
        "10.0.0.1",
        "0.0.0.0",
        "127.0.0.1.nip.io",
        "localhost,db",
        "/run/pg",
        "%2Frun%2Fpg",
        "db:1,db:2",
        "\\\\x",
    ]
)
PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "host",
            "sslmode",
            "sslrootcert",
            "sslcert",
            "sslkey",
            "passfile",
            "hostaddr",
            "gssencmode",
            "service",
            "dbname",
            "password",
            "port",
            "SSLMODE",
            "target_session_attrs",
            "",
        ]
    ),
    st.sampled_from(
        ["verify-full", "verify-ca", "require", "disable", "/r.pem", "", "db", "localhost", "/run/pg", SECRET]
    ),
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(
    scheme=st.sampled_from(["postgresql+psycopg", "postgresql", "postgresql+psycopg2", "POSTGRESQL+PSYCOPG"]),
    credentials=st.sampled_from(["u@", f"u:{SECRET}@", f":{SECRET}@", "", "u:@"]),
    host=HOSTS,
    database=st.sampled_from(["/state", "", "/", "/a/b"]),
    parameters=PARAMETERS,
    mode=st.sampled_from([0o600, 0o644]),
)
def test_whatever_is_written_nothing_goes_elsewhere_unverified_and_no_password_is_shown(
    scheme: str, credentials: str, host: str, database: str, parameters: dict[str, str], mode: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.touch()
    file.chmod(mode)
    query = "&".join(f"{key}={value}" for key, value in parameters.items())
    refused = ""
    try:
        place = DatabasePlace.parse(f"{scheme}://{credentials}{host}{database}?{query}", file)
    except ConfigurationError as error:
        refused = str(error)
    if refused:  # a value of another parameter than the password may be shown
        assert SECRET not in refused or SECRET in {**parameters, "password": ""}.values()
        return
    assert place.host.startswith("/") or is_loopback(place.host) or (
        place.parameters["sslmode"] == "verify-full" and place.parameters["sslrootcert"].startswith("/")
    )  # fmt: skip
    assert set(place.parameters) <= {
        "host",
        "hostaddr",
        "gssencmode",
        "port",
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
        "passfile",
    }
    assert place.url.password is None or mode == 0o600
    assert place.url.password is None or SECRET not in place.name + repr(place)


def test_a_value_that_is_no_text_is_not_shown() -> None:
    for value in (f'["postgresql+psycopg://u:{SECRET}@h/d"]', f'{{ url = "u:{SECRET}@h" }}', "7"):
        with pytest.raises(ConfigurationError, match=r"\[storage\] database is no text: put it in quotes") as caught:
            Settings.parse(f'federation = "clinics"\n[storage]\ndatabase = {value}\n', "federation.toml")
        assert SECRET not in str(caught.value)


def test_commands_that_work_on_the_folder_alone_say_what_to_use_instead(file: Path) -> None:
    elsewhere = Settings.parse(
        'federation = "clinics"\n[storage]\ndatabase = "postgresql+psycopg://u@localhost/d"\n', "it"
    )
    for command in ("backup", "restore"):
        with pytest.raises(
            ConfigurationError,
            match=rf"`coordinator {command}` .* pg_dump, .* pg_restore .*`coordinator settle`.*attempt-keys",
        ):
            require_sqlite(elsewhere, command)
    here = Settings.parse('federation = "clinics"\n', "it")
    require_sqlite(here, "backup")
    assert server_of(here, file) is None


def test_a_missing_driver_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "psycopg", None)
    settings = Settings.parse('federation = "c"\n[storage]\ndatabase = "postgresql+psycopg://u@localhost/d"\n', "it")
    with pytest.raises(ConfigurationError, match=r"package psycopg is not installed: pip install 'psycopg\[binary\]"):
        server_of(settings, file)
