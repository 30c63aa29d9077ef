"""`coordinator check` finds each misconfiguration of its table when that really is there, and nothing where all is
well."""

import asyncio
import json
import os
import resource
import socket
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lorica_coordinator.cli import main
from lorica_coordinator.edges.check.found import Ground
from lorica_coordinator.edges.check.misconfigurations import Mistake
from lorica_coordinator.edges.check.preflight import preflight
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import key_files
from lorica_coordinator.opened import load_keys
from lorica_coordinator.service.records import EnrolledSilo, Invitation
from lorica_coordinator.settings import Settings
from lorica_security.console.preflight import Check, Outcome
from lorica_security.errors import ConfigurationError
from lorica_security.host import key_file
from lorica_security.host.files import write_private
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import SiloName
from lorica_security.pki.authority import Authority
from tests.support.command_line import run_command
from tests.support.coordinator import FEDERATION, FederationTemplate, federation_template, initialise, running

__all__ = ["federation_template"]

PASSPHRASE = "a passphrase of thirty characters"
NOW = datetime.now(UTC)


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (key_file.PASSPHRASE, key_file.NEW_PASSPHRASE):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(f"{name}_FILE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def folder(federation_template: FederationTemplate, tmp_path: Path) -> CoordinatorFolder:
    """Two enrolled silos, the plan `default`, ports that are free."""
    return federation_template.copy(tmp_path / "coordinator")


def ground_of(folder: CoordinatorFolder, /, **changes: Any) -> Ground:
    ground = Ground(folder=folder, keys=lambda settings: load_keys(folder, settings), now=lambda: datetime.now(UTC))
    return replace(ground, **changes)


def found(checks: Any) -> list[tuple[str, str]]:
    """Check and name of everything that is wrong."""
    return [(check.name, check.misconfiguration) for check in checks if check.outcome is Outcome.FAILED]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, old
    path.write_text(text.replace(old, new, 1))


def plan_file(folder: CoordinatorFolder) -> Path:
    return folder.root / "state" / "plans" / "default" / "plan.toml"


def database(folder: CoordinatorFolder) -> Path:
    return folder.root / "state" / "state.sqlite"


# --- each made to happen: a function that spoils the folder, and says what else of the ground is otherwise
# -----------------

Spoil = Callable[[CoordinatorFolder, pytest.MonkeyPatch], dict[str, Any] | None]
SPOILS: dict[Mistake, list[Spoil]] = {}


def makes(mistake: Mistake) -> Callable[[Spoil], Spoil]:
    def noted(spoil: Spoil) -> Spoil:
        SPOILS.setdefault(mistake, []).append(spoil)
        return spoil

    return noted


MASKED = (("secure_aggregation = false", "secure_aggregation = true"), ("max_weight = 0.0", "max_weight = 100.0"))
"""What a plan's text needs to have masked sums."""


@makes(Mistake.SETTINGS)
def misspelt_key(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, "validity_hours", "validity_hour")


@makes(Mistake.FOLDER_OPEN)
def keys_that_others_may_list(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    folder.keys.chmod(0o755)


@makes(Mistake.FOLDER_OPEN)
def state_that_a_group_may_enter(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    elsewhere = folder.root.with_name("state")
    (folder.root / "state").rename(elsewhere)
    elsewhere.chmod(0o750)
    edit(folder.settings, 'state = "state"', 'state = "../state"')


@makes(Mistake.STATE_UNUSABLE)
def state_below_a_file(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, 'state = "state"', 'state = "federation.toml/state"')


@makes(Mistake.KEY_OPEN)
def key_that_others_may_read(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    (folder.keys / "identity.key").chmod(0o640)


@makes(Mistake.KEY_MISSING)
def key_that_is_gone(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    (folder.keys / "ca.key").unlink()


@makes(Mistake.KEY_CLEAR)
def key_in_clear_beside_a_passphrase(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(key_file.PASSPHRASE, PASSPHRASE)


@makes(Mistake.PASSPHRASE)
def wrong_passphrase(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    key_file.protect(key_files(folder.keys), {key_file.NEW_PASSPHRASE: PASSPHRASE})
    patch.setenv(key_file.PASSPHRASE, PASSPHRASE[::-1])


@makes(Mistake.PASSPHRASE)
def no_passphrase(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    key_file.protect(key_files(folder.keys), {key_file.NEW_PASSPHRASE: PASSPHRASE})


@makes(Mistake.TOKEN)
def token_whose_library_is_gone(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    uri = "pkcs11:token=hsm;object=ca?module-path=/usr/lib/no-library.so&pin-source=/etc/lorica/pin"
    write_private(folder.keys / "ca.key", f"{uri}\npublic 00\n".encode())


@makes(Mistake.PASSPHRASE)
def passphrase_that_is_too_short(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    patch.setenv(key_file.PASSPHRASE, "secret")


@makes(Mistake.KEY_DAMAGED)
def authority_of_another_key(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    (folder.keys / "ca.pem").write_bytes(Authority.create(FEDERATION, now=NOW).certificate_pem())


@makes(Mistake.FEDERATION_RENAMED)
def another_name(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, f'federation = "{FEDERATION}"', 'federation = "south"')


@makes(Mistake.AUTHORITY_ENDED)
def authority_after_its_end(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"now": lambda: NOW + timedelta(days=3660)}


@makes(Mistake.AUTHORITY_ENDING)
def authority_before_its_end(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"now": lambda: NOW + timedelta(days=3648)}


@makes(Mistake.CLOCK_EARLY)
def clock_before_the_authority(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"now": lambda: NOW - timedelta(days=400)}


@makes(Mistake.CLOCK_BEHIND)
def record_of_tomorrow(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    with closing(SqlRoundStore(database(folder), FEDERATION)) as store:
        store.seen(SiloName("bank-b"), datetime.now(UTC).timestamp() + 86_400)


@makes(Mistake.HOST_UNRESOLVED)
def name_that_nobody_has(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, '["127.0.0.1"]', '["127.0.0.1", "nowhere.invalid"]')


@makes(Mistake.HOST_LOOPBACK)
def loopback_for_everybody(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, '\nsilos = "127.0.0.1:', '\nsilos = "0.0.0.0:')


def test_loopback_for_everybody_is_no_mistake_where_this_machine_alone_is_meant(
    folder: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loopback_for_everybody(folder, monkeypatch)
    edit(folder.settings, "this_machine_alone = false", "this_machine_alone = true")
    assert found(preflight(ground_of(folder))) == []


@makes(Mistake.LISTEN_LOOPBACK)
def listening_to_itself(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, '["127.0.0.1"]', '["192.0.2.7"]')


@makes(Mistake.PORTS_ALIKE)
def one_port_for_two(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    listen = Settings.read(folder.settings).listen
    edit(folder.settings, f'"{listen.enrolment}"', f'"{listen.silos}"')


@makes(Mistake.PORT_TAKEN)
def port_of_another_process(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    other = socket.socket()
    other.bind(("127.0.0.1", int(Settings.read(folder.settings).listen.enrolment.rpartition(":")[2])))
    other.listen()
    patch.setattr(folder_holding, "socket", other, raising=False)  # open until the test ends
    return {}


class folder_holding:  # noqa: N801  # a place for what a spoil keeps open
    socket: Any = None


@makes(Mistake.ADDRESS_ELSEWHERE)
def address_of_another_machine(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    listen = Settings.read(folder.settings).listen
    edit(folder.settings, f'"{listen.metrics}"', '"192.0.2.7:9464"')


@makes(Mistake.DATABASE_MISSING)
def state_without_a_database(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    database(folder).unlink()


@makes(Mistake.DATABASE_VERSION)
def database_of_another_release(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(database(folder))) as other:
        other.execute("UPDATE schema SET version = 999")
        other.commit()


@makes(Mistake.DATABASE_SERVER)
def server_that_is_away(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, 'database = ""', 'database = "postgresql+psycopg://lorica@127.0.0.1:1/state"')


@makes(Mistake.BUCKET)
def bucket_without_a_database_elsewhere(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(folder.settings, 'blobs = ""', 'blobs = "s3://lorica/north?region=eu-central-1"')


@makes(Mistake.DATABASE_DAMAGED)
def database_that_is_none(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    for more in ("-wal", "-shm"):
        database(folder).with_name(f"state.sqlite{more}").unlink(missing_ok=True)
    database(folder).write_bytes(b"this is no database" * 100)


@makes(Mistake.DATABASE_DAMAGED)
def database_with_a_page_of_rubbish(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    with closing(sqlite3.connect(database(folder))) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(database(folder).read_bytes())
    assert len(content) > 5 * 4096
    content[4096 * 3 : 4096 * 5] = os.urandom(4096 * 2)
    database(folder).write_bytes(content)


@makes(Mistake.PLAN_MISSING)
def plan_that_was_never_made(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"plan": "winter"}


@makes(Mistake.THRESHOLD)
def threshold_above_the_cohort(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    text = plan_file(folder).read_text()
    section = text.index("[aggregation]")
    for old, new in (*MASKED, ("threshold = 0", "threshold = 7")):
        text = text[:section] + text[section:].replace(old, new, 1)
    plan_file(folder).write_text(text.replace("min_silos = 1", "min_silos = 4", 1))


@makes(Mistake.PLAN_WRONG)
def plan_with_a_misspelt_key(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(plan_file(folder), "\nrounds = ", "\nround = ")


@makes(Mistake.NOISE)
def noise_that_drowns(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    text = plan_file(folder).read_text()
    for old, new in (
        ('level = "none"', 'level = "silo"'),
        ("noise_multiplier = 0.0", "noise_multiplier = 900.0"),
        ("initial = true", "initial = false"),
        ("last = true", "last = false"),
        ("every = 1", "every = 0"),
    ):
        text = text.replace(old, new, 1)
    for key, value in (("max_weight", "500.0"), ("max_delta_norm", "1.0")):
        lines = [f"{key} = {value}" if line.lstrip("# ").startswith(f"{key} =") else line for line in text.splitlines()]
        text = "\n".join(lines) + "\n"
    plan_file(folder).write_text(text)


@makes(Mistake.PLAN_EDITED)
def model_of_a_plan_that_was_exchanged(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    file = plan_file(folder).with_name("model.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@makes(Mistake.TOO_FEW)
def quorum_of_three(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    edit(plan_file(folder), "min_silos = 1", "min_silos = 3")


@makes(Mistake.TOO_MANY)
def cohort_beyond_secure_aggregation(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    from silo_wire.codecs.secure_codec import MAX_COHORT

    with closing(SqlRoundStore(database(folder), FEDERATION)) as store:
        for number in range(MAX_COHORT):
            name, secret = SiloName(f"silo-{number}"), number.to_bytes(32, "big")
            store.invite(Invitation(silo=name, secret_digest=secret, expires_unix_s=2.0, pin=""))
            store.enrol(
                EnrolledSilo(
                    silo=name,
                    identity_public_key=bytes(32),
                    certificate_serial=f"{number:x}",
                    certificate_digest=f"{number:064x}",
                    certificate_expires_unix_s=2.0,
                    enrolled_unix_s=1.0,
                    last_seen_unix_s=1.0,
                ),
                secret_digest=secret,
            )
    edit(plan_file(folder), "min_silos = 1", "min_silos = 3")
    for old, new in MASKED:
        edit(plan_file(folder), old, new)


@makes(Mistake.DISK)
def disk_with_a_mebibyte(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"free_disk": lambda folder: 1 << 10}


@makes(Mistake.MEMORY)
def memory_that_others_have(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    return {"free_memory": lambda: 100 << 20}


@makes(Mistake.OPEN_FILES)
def few_open_files(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resource, "getrlimit", lambda which: (256, 1024))


@makes(Mistake.DEVICE)
def gpu_that_is_not_there(folder: CoordinatorFolder, patch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has the GPU that the settings ask for")
    edit(folder.settings, 'device = "auto"', 'device = "cuda"')


CASES = [(mistake, spoil) for mistake, spoils in SPOILS.items() for spoil in spoils]


@pytest.mark.parametrize(("mistake", "spoil"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_is_found_under_its_name_alone_and_its_remedy_said(
    folder: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch, mistake: Mistake, spoil: Spoil
) -> None:
    changes = spoil(folder, monkeypatch) or {}
    checks = preflight(ground_of(folder, **changes))
    what = mistake.value
    assert found(checks) == [(what.found_by, what.name)]
    (failed,) = (check for check in checks if check.outcome is Outcome.FAILED)
    assert "\n" not in failed.detail
    assert len(failed.detail) > len(what.name) + 20
    if folder_holding.socket is not None:
        folder_holding.socket.close()


def test_what_only_a_running_coordinator_shows_is_made_to_happen_below_and_the_rest_above() -> None:
    running_alone = {Mistake.FOLDER_HELD, Mistake.CERTIFICATE_ENDING, Mistake.NAMES_CHANGED}
    as_a_user = {Mistake.PORT_PRIVILEGED}
    of_two_folders = {Mistake.KEYS_OLDER, Mistake.KEYS_DISK}  # test_authorities_in_log.py, and below
    assert set(SPOILS) | running_alone | as_a_user | of_two_folders == set(Mistake)
    assert not set(SPOILS) & running_alone


@pytest.mark.parametrize("lacks", ["room", "folder", "nothing"])
def test_the_disk_of_attempt_keys_is_looked_at_though_the_states_has_room(
    folder: CoordinatorFolder, tmp_path: Path, lacks: str
) -> None:
    shared = tmp_path / "shared"
    edit(folder.settings, 'database = ""', 'database = "postgresql+psycopg://lorica@127.0.0.1:1/state"')
    edit(folder.settings, 'attempt_keys = ""', f'attempt_keys = "{shared}"')
    if lacks != "folder":
        shared.mkdir(mode=0o700)

    def free(of: Path) -> int:
        return 15 << 20 if of == shared and lacks == "room" else 1 << 40

    mistakes = [(Mistake.DATABASE_SERVER.value.found_by, Mistake.DATABASE_SERVER.value.name)]
    if lacks != "nothing":
        mistakes.append((Mistake.KEYS_DISK.value.found_by, Mistake.KEYS_DISK.value.name))
    assert found(preflight(ground_of(folder, free_disk=free))) == mistakes


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may have any port: run the tests as another user")
def test_port_that_users_may_not_have(folder: CoordinatorFolder) -> None:
    listen = Settings.read(folder.settings).listen
    edit(folder.settings, f'"{listen.silos}"', '"127.0.0.1:443"')
    assert found(preflight(ground_of(folder))) == [("ports", "port-privileged")]


# --- beside a running coordinator
# -----------------------------------------------------------------------------------------


@contextmanager
def served(folder: CoordinatorFolder) -> Iterator[Callable[..., list[Check]]]:
    """A real coordinator on the folder; what is called runs the checks beside it."""
    with ProcessLock(folder.lock, "coordinator"), asyncio.Runner() as runner:
        entered = running(folder)
        runner.run(entered.__aenter__())

        def check(**changes: Any) -> list[Check]:
            async def beside() -> list[Check]:
                return list(await asyncio.to_thread(preflight, ground_of(folder, **changes)))

            return runner.run(beside())

        try:
            yield check
        finally:
            runner.run(entered.__aexit__(None, None, None))


def test_beside_a_running_coordinator_nothing_is_wrong_until_its_certificate_is(folder: CoordinatorFolder) -> None:
    with served(folder) as check:
        checks = check()
        assert found(checks) == []
        said = {one.name: one.detail for one in checks}
        assert f"process {os.getpid()} serves" in said["process"]
        assert f"the running coordinator (process {os.getpid()}) has them" in said["ports"]

        assert found(check(now=lambda: NOW + timedelta(days=85))) == [("certificates", "own-certificate-ending")]
        edit(folder.settings, '["127.0.0.1"]', '["127.0.0.1", "localhost"]')
        assert found(check()) == [("certificates", "names-changed")]


def test_a_folder_that_is_held_by_a_process_that_does_not_serve(folder: CoordinatorFolder) -> None:
    with ProcessLock(folder.lock, "coordinator"):
        assert found(preflight(ground_of(folder))) == [("process", "folder-held")]


def test_a_folder_whose_address_another_federation_answers_at(folder: CoordinatorFolder, tmp_path: Path) -> None:
    other = initialise(tmp_path / "other", FEDERATION)
    edit(folder.settings, Settings.read(folder.settings).listen.silos, Settings.read(other.settings).listen.silos)
    with ProcessLock(folder.lock, "coordinator"), served(other) as check:
        of_this_one = {"folder": folder, "keys": lambda settings: load_keys(folder, settings)}
        assert found(check(**of_this_one)) == [("process", "folder-held")]


# --- the command
# ------------------------------------------------------------------------------------------------------------


def contents(folder: CoordinatorFolder) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (stat.S_IMODE(path.stat().st_mode), path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.root.rglob("*"))
        if not path.name.startswith("state.sqlite-")
    }


def test_a_sound_folder_passes_and_is_left_as_it_was(folder: CoordinatorFolder) -> None:
    before = contents(folder)
    done = run_command(main, "check", "--dir", folder.root)
    assert (done.code, done.err) == (0, ""), done.out + done.err
    assert "failed" not in done.out
    assert contents(folder) == before


def test_a_silo_that_was_revoked_counts_no_more(folder: CoordinatorFolder) -> None:
    assert run_command(main, "revoke", "hospital-a", "--dir", folder.root).code == 0
    edit(folder.root / "state" / "plans" / "default" / "plan.toml", "min_silos = 1", "min_silos = 2")
    done = run_command(main, "check", "--dir", folder.root)
    assert "is whole; enrolled: 1" in done.out
    assert "1 silos are enrolled, plan default has min_silos = 2" in done.out


def test_what_is_wrong_is_named_with_the_exit_code(folder: CoordinatorFolder) -> None:
    (folder.keys / "identity.key").chmod(0o644)
    edit(plan_file(folder), "min_silos = 1", "min_silos = 3")
    done = run_command(main, "check", "--dir", folder.root)
    assert done.code == 3
    assert done.err == "error: 2 of 15 checks failed: keys, cohort\n"
    assert "key-open: " in done.out
    assert "chmod 600" in done.out

    listed = json.loads(run_command(main, "check", "--json", "--dir", folder.root).out)
    assert [one["misconfiguration"] for one in listed if one["outcome"] == "failed"] == ["key-open", "too-few-silos"]


def test_without_a_folder_it_says_so(tmp_path: Path) -> None:
    run_command(main, "check", "--dir", tmp_path).is_refusal(ConfigurationError, "coordinator init DIR")
