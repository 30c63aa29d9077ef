"""Bad input to the two commands: one line that names thing, value and remedy, the documented exit code, nothing
harmed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lorica.demo.ports import free_ports
from lorica_coordinator.cli import main as coordinator_main
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.settings import Settings
from lorica_security.errors import (
    EXIT_CODES,
    AuthenticationError,
    ConfigurationError,
    Conflict,
    DataError,
    IntegrityError,
    LoricaError,
    StateError,
    StorageError,
    Unreachable,
)
from lorica_security.identity.enrolment_token import encode
from lorica_security.pki.pins import spki_pin
from silo_agent.cli import main as agent_main
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, store_credentials
from tests.support.command_line import Done, run_command
from tests.support.coordinator import (
    FEDERATION,
    HOSPITAL,
    PATIENCE_S,
    PLAN,
    FederationTemplate,
    accepts,
    contents_of,
)
from tests.support.coordinator import federation_template as federation_template
from tests.support.tiny_t5 import SCHEMA
from tests.support.tokens import mint

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No command finds this machine's own federations or silos."""
    for name in ("LORICA_COORDINATOR_DIR", "LORICA_SILO_DIR", "HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home" / "data"))
    monkeypatch.setenv("COLUMNS", "80")  # a narrow terminal breaks no error line
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(federation_template: FederationTemplate, tmp_path: Path) -> CoordinatorFolder:
    """A coordinator with two enrolled silos and the plan `default`."""
    return federation_template.copy(tmp_path / "coordinator")


@pytest.fixture
def silo(federation_template: FederationTemplate, tmp_path: Path) -> SiloFolder:
    """hospital-a's folder; nobody listens at its coordinator's address."""
    return silo_of(federation_template.silos[HOSPITAL], tmp_path / "silo", f"127.0.0.1:{free_ports(1)[0]}")


def silo_of(credentials: SiloCredentials, root: Path, address: str) -> SiloFolder:
    folder = SiloFolder(root)
    folder.make()
    store_credentials(folder, replace(credentials, address=address))
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_data(tmp_path / "data")


def make_data(root: Path) -> Path:
    root.mkdir()
    (root / "schema.json").write_bytes(SCHEMA.to_json())
    for name, first, count in (("train", 0, 10), ("dev", 100, 2)):
        (root / f"{name}.jsonl").write_text("\n".join(line(first + number) for number in range(count)) + "\n")
    return root


def line(number: int, **changes: Any) -> str:
    entry = {"id": f"e-{number}", "question": f"question {number} ?", "query": "SELECT 1 ;", "db_id": SCHEMA.db_id}
    return json.dumps({**entry, **changes})


def coordinator(folder: CoordinatorFolder, *arguments: str | Path) -> Done:
    return run_command(coordinator_main, *arguments, "--dir", folder.root)


def agent(folder: SiloFolder, *arguments: str | Path) -> Done:
    return run_command(agent_main, *arguments, "--dir", folder.root)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


# --- coordinator init, invite, --dir
# ------------------------------------------------------------------------------------


def test_init_into_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("mine")
    run_command(coordinator_main, "init", taken).is_refusal(
        ConfigurationError, str(taken), "is not empty", "choose a new folder"
    )
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


ELSEWHERE = ("--database", "postgresql+psycopg://lorica@/lorica?host=/run/postgresql")


def test_init_of_a_coordinator_without_a_disk_is_one_command(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "new", "s3://lorica/north?endpoint=https://s3.example.org&credentials=/files/s3"
    words = ("init", folder, "--no-plan", *ELSEWHERE, "--blobs", blobs)
    inside = run_command(coordinator_main, *words, "--attempt-keys", folder / "state" / "spools")
    inside.is_refusal(ConfigurationError, "--attempt-keys = ", "name a folder apart from the state folder")
    assert not folder.exists()
    done = run_command(coordinator_main, *words, "--attempt-keys", "/mnt/keys")
    assert done.code == 0, done.err
    assert "attempt_keys" not in done.out
    storage = Settings.read(folder / "federation.toml").storage
    assert (storage.database, storage.blobs, storage.attempt_keys) == (ELSEWHERE[1], blobs, "/mnt/keys")
    bare = run_command(coordinator_main, "init", tmp_path / "bare", *words[2:])
    assert "set attempt_keys to a folder that every coordinator sees" in bare.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--federation", "Bad Name"], ["'Bad Name'", "a-z"]),
        (["--host", "not a host"], ["hosts", "not a host", "give one without port"]),
        (["--silos-port", "70000"], ["listen.silos", "70000", "use ADDRESS:PORT"]),
        (["--blobs", "s3://lorica/x?region=eu-central-1"], ["--blobs s3://lorica/x", "give --database as well"]),
        (["--attempt-keys", "/keys"], ["--attempt-keys /keys", "give --database as well"]),
        ([*ELSEWHERE, "--blobs", "file:///x"], ["--blobs is of the kind 'file'", "use s3://BUCKET/PREFIX"]),
        ([*ELSEWHERE, "--blobs", "s3://lorica/x?endpoint=http://s3.example.org"], ["--blobs", "https"]),
        ([*ELSEWHERE, "--attempt-keys", "keys"], ["--attempt-keys keys is no path from / on", "give the whole path"]),
    ],
    ids=["federation", "host", "port", "blobs", "keys", "no bucket", "in clear", "no whole path"],
)
def test_init_with_values_that_cannot_be(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    target = tmp_path / "new"
    run_command(coordinator_main, "init", target, *arguments).is_refusal(ConfigurationError, *words)
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["invite", "Hospital_A"], ["silo name 'Hospital_A'", "a-z"]),
        (["invite", "../../etc"], ["silo name '../../etc'"]),
        (["invite", "clinic-c", "--hours", "0"], ["0 seconds", "use 1 to"]),
        (["invite", "clinic-c", "--hours", "-5"], ["0 seconds", "use 1 to"]),
        (["invite", "clinic-c", "--hours", "1e9"], ["3600000000000 seconds", "use 1 to"]),
        (["invite", "clinic-c", "--hours", "inf"], ["inf seconds", "use 1 to"]),
        (["plan", "show", "absent"], ["'absent'", "coordinator plan new"]),
        (["plan", "start", "absent"], ["'absent'", "coordinator plan new"]),
        (["plan", "start", "../default"], ["'../default'"]),
        (["plan", "new", PLAN, "--size", "micro"], ["'default' already exists", "choose another name"]),
        (["plan", "new", "Bad Name", "--size", "micro"], ["'Bad Name'", "a-z"]),
        (["plan", "new", "p", "--size", "gigantic"], ["size 'gigantic' is unknown", "micro"]),
        (["plan", "new", "p", "--preset", "papper"], ["'papper'", "paper-text"]),
        (["plan", "new", "p", "--size", "micro", "--hub", "a/b"], ["give one of --size, --model and --hub"]),
        (["plan", "new", "p", "--size", "micro", "--set", "schedule.rounds"], ["'schedule.rounds'", "KEY=VALUE"]),
        (
            ["plan", "new", "p", "--size", "micro", "--set", "schedule.runds=3"],
            ["schedule.runds", "correct its spelling"],
        ),
        (["plan", "new", "p", "--size", "micro", "--set", "schedule.rounds=0"], ["schedule.rounds = 0"]),
        (["plan", "new", "p", "--size", "micro", "--set", "schedule.rounds=many"], ["schedule.rounds = 'many'"]),
        (["plan", "new", "p", "--size", "micro", "--set", "name.x=1"], ["name.x"]),
        (["plan", "new", "p", "--size", "micro", "--set", "model.source=evil"], ["model.source", "cannot be set here"]),
        (["plan", "new", "p", "--size", "micro", "--tokenizer-text", "/absent"], ["/absent", "give a UTF-8 text file"]),
        (["plan", "new", "p", "--model", "/absent"], ["/absent"]),
        (["serve", "--plan", "absent", "--log-level", "error"], ["'absent'", "coordinator plan new"]),
        (["serve", "--log-level", "loud"], ["'loud'", "use debug"]),
    ],
    ids=lambda value: "-".join(value)[:50].replace("/", "") if isinstance(value, list) else None,
)
def test_argument_that_a_user_can_correct(folder: CoordinatorFolder, arguments: list[str], words: list[str]) -> None:
    before = contents_of(folder.root)
    coordinator(folder, *arguments).is_refusal(ConfigurationError, *words)
    assert not [path for path in (folder.root / "state" / "plans").iterdir() if path.name != PLAN]
    assert differences(before, contents_of(folder.root)) <= HARMLESS


def test_a_plan_that_cannot_be_is_refused_with_all_that_is_wrong_before_a_model_is_made(
    folder: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lorica_coordinator.plans.model_source", None)  # an import of it is an error
    values = "aggregation.secure_aggregation=true", "schedule.min_silos=2", "training.weight_decay=0.1"
    refused = coordinator(folder, "plan", "new", "p", *(word for value in values for word in ("--set", value)))
    refused.is_refusal(
        ConfigurationError, "plan p: [aggregation] max_weight = 0", "min_silos = 2 is too few", "weight_decay = 0.1"
    )
    assert "{" not in refused.err, "no section is printed whole"
    assert not (folder.root / "state" / "plans" / "p").exists()


@pytest.mark.parametrize("days", ["0", "-1", "0.000001", "1e9", "inf", "nan"])
def test_access_for_no_days_at_all_or_for_ever_is_refused(folder: CoordinatorFolder, tmp_path: Path, days: str) -> None:
    """0 on the wire is what the settings say: nobody who types it means that."""
    laptop = tmp_path / "laptop"
    asked = run_command(coordinator_main, "access", "request", FEDERATION, "victor", "--dir", laptop)
    (tmp_path / "csr").write_text(asked.out)
    before = contents_of(folder.root)
    done = coordinator(folder, "access", "grant", "victor", str(tmp_path / "csr"), "--days", days)
    done.is_refusal(ConfigurationError, "access valid for", "use 1 to")
    assert contents_of(folder.root) == before


HARMLESS = {
    "audit/log.000001",  # that it was asked for
    "state/state.sqlite",
    "state/state.sqlite-wal",
    "state/state.sqlite-shm",
    "keys/operator-pair.pem",
}
"""Opening the database and issuing the operator's certificate are not harm; what the database says is compared
apart."""


def differences(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def test_folder_that_is_no_coordinators(tmp_path: Path) -> None:
    for absent in (tmp_path / "absent", tmp_path):
        run_command(coordinator_main, "status", "--dir", absent).is_refusal(
            ConfigurationError, str(absent), "federation.toml", "coordinator init"
        )
    run_command(coordinator_main, "status").is_refusal(ConfigurationError, "no federation is known here", "--dir")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[listen]", "[listen", ["is not TOML", "line"]),
        ("[listen]", "[listen]\nsilo = 7", ["unknown key listen.silo", "correct its spelling"]),
        ("[listen]", "[lisden]", ["unknown key lisden"]),
        (f'federation = "{FEDERATION}"', "federation = 7", ["federation = 7"]),
        (
            f'federation = "{FEDERATION}"',
            'federation = "another"',
            ["'another'", f"'{FEDERATION}'", "correct the name"],
        ),
        (f'federation = "{FEDERATION}"', "", ["key federation is missing", "add it"]),
        ('hosts = ["127.0.0.1"]', "hosts = []", ["public.hosts = []"]),
        ('metrics = "127.0.0.1', 'metrics = "127.0.0.1:99', ["listen.metrics", "use ADDRESS:PORT"]),
    ],
    ids=["syntax", "unknown-key", "unknown-section", "type", "other-federation", "missing", "no-hosts", "address"],
)
def test_malformed_federation_toml(folder: CoordinatorFolder, old: str, new: str, words: list[str]) -> None:
    edit(folder.settings, old, new)
    before = contents_of(folder.root)
    coordinator(folder, "status").is_refusal(ConfigurationError, str(folder.settings), *words)
    assert contents_of(folder.root) == before


def test_authority_key_that_others_can_read(folder: CoordinatorFolder) -> None:
    key = folder.keys / "ca.key"
    key.chmod(0o644)
    coordinator(folder, "status").is_refusal(ConfigurationError, str(key), "0644", "chmod 600")
    assert key.stat().st_mode & 0o777 == 0o644  # refused, not mended: somebody may have read it


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("ca.key", None, ["ca.key", "is missing"]),
        ("ca.key", b"garbage", ["CA key file", "restore it from backup"]),
        ("ca.pem", b"garbage", ["CA certificate file"]),
        ("identity.key", b"garbage", ["restore"]),
    ],
    ids=["no-key", "garbage-key", "garbage-certificate", "garbage-identity"],
)
def test_damaged_keys(folder: CoordinatorFolder, name: str, content: bytes | None, words: list[str]) -> None:
    path = folder.keys / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
    coordinator(folder, "status").is_refusal(ConfigurationError, *words)


# --- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[schedule]", "[schedule", ["is not TOML"]),
        ("rounds = 2", "rounds = 2\nrouns = 3", ["unknown key schedule.rouns", "remove it or correct its spelling"]),
        ("rounds = 2", 'rounds = "two"', ["schedule.rounds = 'two'"]),
        ("rounds = 2", "rounds = -1", ["schedule.rounds = -1"]),
        ("rounds = 2", "", ["key schedule.rounds is missing"]),
        ("min_silos = 1", "min_silos = 0", ["schedule.min_silos = 0"]),
        ("min_silos = 1", "min_silos = true", ["schedule.min_silos = True"]),
        ("training_deadline_s = 600.0", "training_deadline_s = nan", ["schedule.training_deadline_s = nan"]),
        ("max_weight_share = 0.0", "max_weight_share = 0.5", ["max_weight_share = 0.5", "min_silos = 1", "raise it"]),
        ('weighting = "lorar"', 'weighting = "lora"', ["aggregation.weighting = 'lora'", "'lorar'"]),
        ("learning_rate = 0.0025", "learning_rate = inf", ["training.learning_rate = inf"]),
        (f'name = "{PLAN}"', 'name = "other"', ["'other'", "make them agree"]),
        ("version = 1", "version = 2", ["version = 2"]),
    ],
    ids=[
        "syntax",
        "unknown-key",
        "text-for-a-number",
        "negative",
        "missing",
        "no-quorum",
        "boolean-quorum",
        "nan-deadline",
        "impossible-cap",
        "weighting",
        "infinite-rate",
        "name",
        "version",
    ],
)
def test_malformed_plan(folder: CoordinatorFolder, old: str, new: str, words: list[str]) -> None:
    path = folder.root / "state" / "plans" / PLAN / "plan.toml"
    edit(path, old, new)
    before = contents_of(folder.root)
    for command in ("show", "start"):
        coordinator(folder, "plan", command, PLAN).is_refusal(ConfigurationError, str(path), *words)
    assert differences(before, contents_of(folder.root)) <= HARMLESS


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_plan_file_that_was_changed(folder: CoordinatorFolder, name: str) -> None:
    path = folder.root / "state" / "plans" / PLAN / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    coordinator(folder, "plan", "show", PLAN).is_refusal(IntegrityError, str(path), "it was changed", "restore it")


def test_plan_of_another_federation(folder: CoordinatorFolder) -> None:
    edit(folder.root / "state" / "plans" / PLAN / "plan.toml", f'federation = "{FEDERATION}"', 'federation = "another"')
    coordinator(folder, "plan", "start", PLAN).is_refusal(
        ConfigurationError, "'another'", f"'{FEDERATION}'", "correct `federation`"
    )


def test_impossible_quorum(folder: CoordinatorFolder) -> None:
    edit(folder.root / "state" / "plans" / PLAN / "plan.toml", "min_silos = 1", "min_silos = 9")
    coordinator(folder, "plan", "start", PLAN).is_refusal(
        StateError, f"plan {PLAN} has min_silos = 9", "2 silos are enrolled", "enrol more or lower it"
    )
    assert coordinator(folder, "status", "--json").code == 0
    assert json.loads(coordinator(folder, "status", "--json").out)["phase"] == "idle"


def test_nobody_with_labels(folder: CoordinatorFolder) -> None:
    toml = folder.root / "state" / "plans" / PLAN / "plan.toml"
    edit(toml, 'weighting = "lorar"', 'weighting = "equal"')
    edit(toml, "unlabelled = []", 'unlabelled = ["hospital*", "bank*"]')
    edit(toml, 'order = "alternate"', 'order = "together"')
    coordinator(folder, "plan", "start", PLAN).is_refusal(
        StateError, "unlabelled = ['hospital*', 'bank*']", "all 2 enrolled silos", "leave some out of it"
    )
    assert json.loads(coordinator(folder, "status", "--json").out)["phase"] == "idle"


def test_plan_show_prints_every_digest_whole(folder: CoordinatorFolder) -> None:
    """People copy them from here, also out of a pipe or a narrow terminal."""
    value = json.loads(coordinator(folder, "plan", "show", PLAN, "--json").out)
    lines = coordinator(folder, "plan", "show", PLAN).out.splitlines()
    assert f"digest               {value['digest']}" in lines
    for key in ("initial", "layout"):
        assert f'model                {key} = "{value["model"][key]}"' in lines
    assert any(value["model"]["files"]["config.json"] in line for line in lines)
    assert "schedule             min_silos = 1" in lines


def test_a_stopped_plan_goes_on_without_a_name_and_is_left_by_its_own(folder: CoordinatorFolder) -> None:
    assert coordinator(folder, "plan", "start", PLAN).code == 0
    stopped = coordinator(folder, "plan", "stop")
    assert stopped.out == f"stopped by the operator; `coordinator plan start` goes on with plan {PLAN}\n"
    again = coordinator(folder, "plan", "start")
    assert f"plan {PLAN} (" in again.out
    digest = again.out[again.out.index("(") + 1 : again.out.index(")")]
    text = coordinator(folder, "status").out
    assert "coordinator 0" in text
    assert "not running" in text
    assert " s left" not in text, "nothing runs that the time could run out for"
    edit(folder.root / "state" / "plans" / PLAN / "plan.toml", "seed = 0", "seed = 1")
    coordinator(folder, "plan", "start", PLAN).is_refusal(StateError, f"plan {PLAN} ({digest}) is running", "plan stop")
    assert coordinator(folder, "plan", "stop").code == 0
    coordinator(folder, "plan", "start", PLAN).is_refusal(
        StateError, f"plan {PLAN} ({digest}) is stopped", f"coordinator plan start {PLAN} --leave {PLAN}"
    )
    left = coordinator(folder, "plan", "start", PLAN, "--leave", PLAN)
    assert left.code == 0
    assert digest not in left.out


def folder_with(root: Path, **files: str) -> Path:
    root.mkdir()
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


T5_CONFIG = '{"model_type": "t5"}'


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config__json": T5_CONFIG, "pytorch_model__bin": "x"}, ["pytorch_model.bin", "pickle", "safetensors"]),
        ({"config__json": T5_CONFIG, "model__pt": "x"}, ["model.pt", "pickle"]),
        ({"config__json": T5_CONFIG}, ["no parameters"]),
        (
            {"config__json": '{"model_type": "t5", "auto_map": {"AutoModel": "evil.Model"}}'},
            ["config.json", "auto_map"],
        ),
        (
            {"config__json": T5_CONFIG, "tokenizer_config__json": '{"auto_map": {"AutoTokenizer": ["evil.T", null]}}'},
            ["tokenizer_config.json", "auto_map"],
        ),
        ({"config__json": '{"model_type": "bert"}'}, ["model_type 'bert'", "only those of T5"]),
        ({"config__json": "{"}, ["config.json"]),
        ({"config__json": "[]"}, ["config.json"]),
        ({}, ["config.json"]),
        ({"config__json": T5_CONFIG, "model__safetensors": "not safetensors"}, ["is not a safetensors file"]),
    ],
    ids=["pickle", "torch-file", "nothing", "code", "tokenizer-code", "bert", "syntax", "a-list", "empty", "garbage"],
)
def test_model_folder_that_is_not_taken(
    folder: CoordinatorFolder, tmp_path: Path, files: dict[str, str], words: list[str]
) -> None:
    model = folder_with(tmp_path / "model", **files)
    before = contents_of(folder.root)
    coordinator(folder, "plan", "new", "p", "--model", model).is_refusal(ConfigurationError, str(model), *words)
    assert contents_of(folder.root) == before


def test_export_without_a_model_and_into_a_taken_folder(folder: CoordinatorFolder, tmp_path: Path) -> None:
    taken = folder_with(tmp_path / "taken", thesis__txt="mine")
    coordinator(folder, "export", tmp_path / "new").is_refusal(StateError, "no plan has been started", "plan start")
    assert coordinator(folder, "plan", "start", PLAN).code == 0
    coordinator(folder, "export", taken).is_refusal(ConfigurationError, str(taken), "choose another one")
    assert contents_of(taken).keys() == {"thesis.txt"}


# --- serving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listener", ["silos", "enrolment", "metrics"])
def test_port_that_is_taken(folder: CoordinatorFolder, listener: str) -> None:
    listen = getattr(Settings.read(folder.settings).listen, listener)
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(listen.rpartition(":")[2])))
        other.listen()
        done = coordinator(folder, "serve", "--plan", "", "--log-level", "error")
    done.is_refusal(ConfigurationError, f"cannot listen on {listen}", "change")
    assert json.loads(coordinator(folder, "status", "--json").out)["running"] is False


@pytest.mark.parametrize("content", [b"this is no database" * 100, b""], ids=["garbage", "empty"])
def test_damaged_state(folder: CoordinatorFolder, content: bytes) -> None:
    database = folder.root / "state" / "state.sqlite"
    for beside in (
        "-wal",
        "-shm",
    ):  # of a process that made the folder: SQLite would write what is in it over the garbage
        database.with_name(database.name + beside).unlink(missing_ok=True)
    database.write_bytes(content)
    done = coordinator(folder, "status", "--json")
    if content:
        done.is_refusal(StorageError, str(database), "restore the file from backup")
        assert database.read_bytes() == content
    else:  # as new: nobody is enrolled
        assert json.loads(done.out)["silos"] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything: run the tests as another user")
def test_state_that_may_not_be_read(folder: CoordinatorFolder) -> None:
    (folder.root / "state" / "state.sqlite").chmod(0)
    coordinator(folder, "status").is_refusal(StorageError, "state.sqlite", "permissions")


# --- silo-agent ----------------------------------------------------------------------------------------------------


def token_of(federation_template: FederationTemplate, *, lifetime: timedelta, age: timedelta = timedelta(0)) -> str:
    authority = Coordinator.load(CoordinatorFolder(federation_template.folder)).keys.authority
    return encode(
        mint(
            federation=FEDERATION,
            silo=HOSPITAL,
            ca_pin=spki_pin(authority.certificate),
            host="127.0.0.1",
            port=free_ports(1)[0],
            now=datetime.now(UTC) - age,
            lifetime=lifetime,
        )
    )


def test_token_that_cannot_be_used(federation_template: FederationTemplate, tmp_path: Path) -> None:
    fresh = token_of(federation_template, lifetime=timedelta(hours=1))
    stale = token_of(federation_template, lifetime=timedelta(hours=1), age=timedelta(hours=2))
    target = SiloFolder(tmp_path / "new")
    refusals: list[tuple[str, type[LoricaError], list[str]]] = [
        ("hello", ConfigurationError, ["'lorica1-'", "coordinator invite"]),
        (fresh[:-4], ConfigurationError, ["enrolment token", "copy the whole line"]),
        (fresh[:20] + ("a" if fresh[20] != "a" else "b") + fresh[21:], ConfigurationError, ["typing error"]),
        ("lorica1-" + "A" * 5000, ConfigurationError, ["too long"]),
        (stale, AuthenticationError, ["expired at", "coordinator invite"]),
        (fresh, Unreachable, ["127.0.0.1:", "used, replaced or voided", "the coordinator does not run"]),
    ]
    for token, kind, words in refusals:
        done = agent(target, "enroll", token)
        done.is_refusal(kind, *words)
        assert token not in done.err or token == "hello"
    assert contents_of(target.root) == {}  # no key was kept that no certificate is for


def test_second_enrolment_into_one_folder(silo: SiloFolder, federation_template: FederationTemplate) -> None:
    before = contents_of(silo.root)
    token = token_of(federation_template, lifetime=timedelta(hours=1))
    agent(silo, "enroll", token).is_refusal(StateError, str(silo.root), "already holds a silo", "--dir")
    assert contents_of(silo.root) == before


def test_commands_before_enrolment(tmp_path: Path, data: Path) -> None:
    empty = SiloFolder(tmp_path / "empty")
    for arguments in (["start", "--data", data], ["status"], ["pause"], ["ask", "how many ?"]):
        done = agent(empty, *arguments)
        assert done.code in (EXIT_CODES[ConfigurationError], EXIT_CODES[StateError]), done.err
        done.is_refusal(
            StateError if done.code == EXIT_CODES[StateError] else ConfigurationError,
            str(empty.root),
            "silo-agent enroll",
        )


@pytest.mark.parametrize("name", ["tls.pem", "identity.key", "enrolment.json"])
def test_silo_keys_that_others_can_read(silo: SiloFolder, name: str) -> None:
    (silo.root / name).chmod(0o640)
    agent(silo, "status").is_refusal(ConfigurationError, str(silo.root / name), "0640", "chmod 600")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[data", ["is not TOML"]),
        ("[data]\nfoldr = 'x'", ["unknown key data.foldr", "correct its spelling"]),
        ("[data]\nmax_bad_lines_share = 2", ["data.max_bad_lines_share = 2"]),
        ("[training]\ndevice = 'gpu'", ["training.device = 'gpu'"]),
        ("[policy]\nmin_cohor = 3", ["unknown key policy.min_cohor"]),
        ("[metrics]\nlisten = '9465'", ["metrics.listen = '9465'", "use ADDRESS:PORT"]),
    ],
    ids=["syntax", "unknown-key", "range", "device", "policy", "address"],
)
def test_malformed_silo_toml(silo: SiloFolder, data: Path, text: str, words: list[str]) -> None:
    silo.settings.write_text(text)
    agent(silo, "start", "--data", data).is_refusal(ConfigurationError, str(silo.settings), *words)


def test_port_for_a_silos_metrics_that_is_taken(silo: SiloFolder, data: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen = f"127.0.0.1:{other.getsockname()[1]}"
        silo.settings.write_text(f'[metrics]\nlisten = "{listen}"\n')
        agent(silo, "start", "--data", data).is_refusal(
            ConfigurationError, f"cannot listen on {listen} for metrics", "[metrics] listen in silo.toml"
        )


def damage_nothing(data: Path) -> None:
    shutil.rmtree(data)


def remove_schema(data: Path) -> None:
    (data / "schema.json").unlink()


def break_schema(data: Path) -> None:
    (data / "schema.json").write_text("{")


def remove_train(data: Path) -> None:
    (data / "train.jsonl").unlink()


def make_train_a_folder(data: Path) -> None:
    (data / "train.jsonl").unlink()
    (data / "train.jsonl").mkdir()


def spoil_one_line_of_eleven(data: Path) -> None:
    with (data / "train.jsonl").open("a") as file:
        file.write('{"id": "e-1000", "question": 7}\n')


def empty_dev(data: Path) -> None:
    (data / "dev.jsonl").write_text("\n\n")


def break_gzip(data: Path) -> None:
    (data / "train.jsonl").unlink()
    (data / "train.jsonl.gz").write_bytes(b"\x1f\x8b\x08\0garbage")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_nothing, ["is not a folder", "train.jsonl"]),
        (remove_schema, ["schema.json is missing", "silo-agent schema URL"]),
        (break_schema, ["schema.json", "not a JSON schema", "silo-agent schema URL"]),
        (remove_train, ["train.jsonl is missing", "put the train split there"]),
        (make_train_a_folder, ["train.jsonl is no ordinary file", "put the lines themselves there"]),
        (spoil_one_line_of_eleven, ["1 bad lines of 11", "line 11: question is a int", "0.01"]),
        (empty_dev, ["dev.jsonl holds no example"]),
        (break_gzip, ["train.jsonl.gz cannot be read"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_data_that_cannot_be_used(
    silo: SiloFolder, data: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(data)
    agent(silo, "start", "--data", data, "--log-level", "error").is_refusal(DataError, str(data), *words)
    checked = agent(silo, "check", "--data", data)
    assert checked.code == EXIT_CODES[ConfigurationError]
    assert "data" in checked.err
    assert len(checked.err.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything: run the tests as another user")
def test_data_that_may_not_be_read(silo: SiloFolder, data: Path) -> None:
    (data / "train.jsonl").chmod(0)
    agent(silo, "start", "--data", data).is_refusal(DataError, "train.jsonl", "Permission denied")


def test_ask_before_there_is_a_model(silo: SiloFolder) -> None:
    agent(silo, "ask", "how many ?").is_refusal(StateError, "no global model is here yet", "silo-agent start")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://u:hunter2@h/d", ["mysql"]),
        ("sqlite:////absent/db.sqlite", ["/absent/db.sqlite"]),
        ("nonsense", ["nonsense"]),
    ],
    ids=["unknown-database", "no-such-file", "no-url"],
)
def test_schema_of_a_database_that_is_not_there(url: str, words: list[str]) -> None:
    done = run_command(agent_main, "schema", url)
    assert done.code in {EXIT_CODES[kind] for kind in (ConfigurationError, DataError)}
    done.is_refusal(DataError if done.code == EXIT_CODES[DataError] else ConfigurationError, *words)
    assert "hunter2" not in done.err


@pytest.mark.parametrize(
    "command", [["lorica_coordinator.cli", "plan", "nwe"], ["silo_agent.cli", "strat"]], ids=["plan", "silo"]
)
def test_mistyped_command(command: list[str]) -> None:
    mains = {"lorica_coordinator.cli": coordinator_main, "silo_agent.cli": agent_main}
    done = run_command(mains[command[0]], *command[1:])
    assert done.code == 2
    assert "No such command" in done.err
    assert "Traceback" not in done.err


# --- with both programs running -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Running:
    folder: CoordinatorFolder
    silo: SiloFolder
    data: Path
    address: str


def spawn(*arguments: str | Path, log: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", *map(str, arguments)], stdout=file, stderr=file, env=environment, cwd=log.parent
        )


def wait_for(process: subprocess.Popen[bytes], log: Path, holds: Callable[[], bool]) -> None:
    """Until a process that this test started has come as far as its log, or its port, says."""
    deadline = datetime.now(UTC) + timedelta(seconds=3 * PATIENCE_S)
    while not holds():
        assert process.poll() is None, log.read_text()
        assert datetime.now(UTC) < deadline, log.read_text()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)


@pytest.fixture(scope="module")
def both(federation_template: FederationTemplate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One coordinator process and one agent process, connected; both must end well when they are told to."""
    root = tmp_path_factory.mktemp("both")
    folder = federation_template.copy(root / "coordinator")
    settings = Settings.read(folder.settings)
    port = settings.public_silos_port
    silo = silo_of(federation_template.silos[HOSPITAL], root / "silo", f"127.0.0.1:{port}")
    data = make_data(root / "data")
    logs = root / "coordinator.log", root / "agent.log"
    serve = spawn("lorica_coordinator.cli", "serve", "--dir", folder.root, "--plan", "", log=logs[0])
    processes = [serve]
    try:
        wait_for(serve, logs[0], lambda: accepts(port))
        start = spawn("silo_agent.cli", "start", "--dir", silo.root, "--data", data, log=logs[1])
        processes.append(start)
        wait_for(start, logs[1], lambda: "silo connected" in logs[0].read_text())
        yield Running(folder, silo, data, f"127.0.0.1:{port}")
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(PATIENCE_S) for process in processes]
    assert codes == [0, 0], [log.read_text() for log in logs]
    assert not any("Traceback" in log.read_text() for log in logs)


def test_second_coordinator_on_one_folder(both: Running) -> None:
    done = coordinator(both.folder, "serve", "--log-level", "error")
    done.is_refusal(Conflict, "another coordinator (process ", str(both.folder.root), "stop it first")


def test_second_agent_on_one_folder(both: Running) -> None:
    agent(both.silo, "start", "--data", both.data, "--log-level", "error").is_refusal(
        Conflict, "another silo agent (process ", str(both.silo.root), "stop it first"
    )


def test_second_agent_with_a_copy_of_the_keys(both: Running, tmp_path: Path) -> None:
    shutil.copytree(both.silo.root, tmp_path / "copy", ignore=shutil.ignore_patterns("agent.lock"))
    agent(SiloFolder(tmp_path / "copy"), "start", "--data", both.data, "--log-level", "error").is_refusal(
        Conflict, f"silo {HOSPITAL} already has a connected agent", "stop the other one"
    )
    assert json.loads(agent(both.silo, "status", "--json").out)["running"] is True


def test_bad_values_over_the_wire_read_as_without_it(both: Running) -> None:
    coordinator(both.folder, "invite", "Hospital_A").is_refusal(ConfigurationError, "silo name 'Hospital_A'", "a-z")
    coordinator(both.folder, "plan", "start", "absent").is_refusal(ConfigurationError, "'absent'", "plan new")
    plan = both.folder.root / "state" / "plans" / PLAN / "plan.toml"
    text = plan.read_text()
    try:
        edit(plan, "min_silos = 1", "min_silos = 9")
        coordinator(both.folder, "plan", "start", PLAN).is_refusal(StateError, "min_silos = 9", "2 silos are enrolled")
        edit(plan, "min_silos = 9", "min_silos = nine")
        coordinator(both.folder, "plan", "start", PLAN).is_refusal(ConfigurationError, str(plan), "is not TOML")
    finally:
        plan.write_text(text)
    status = json.loads(coordinator(both.folder, "status", "--json").out)
    assert (status["running"], status["phase"]) == (True, "idle")
