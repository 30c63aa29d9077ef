"""A database that was put back, settled by a copy that somebody edited, or that is of another history: what is lost is
said, and the coordinator goes on.

Commands as an operator types them, on a real PostgreSQL; ledgers alone: tests/unit/test_newer_ledgers.py.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow, ChainedRows
from lorica_coordinator.edges.upkeep import authorities_in_log
from lorica_coordinator.opened import Coordinator, leading
from lorica_coordinator.service.unusable import BudgetSpent
from lorica_security.audit.entry import Event
from lorica_security.errors import ConfigurationError, IntegrityError
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.on_disk.reading import read_log
from lorica_security.privacy.ledger import read_ledger
from silo_wire.canonical import Digest
from tests.integration.test_postgresql_settled import PLAN, Federation, Killed
from tests.support.coordinator import initialise
from tests.support.postgresql import PostgresqlServer, running_postgresql
from tests.support.rounds import A, B

OTHER_PLAN = Digest("b" * 64)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


@pytest.fixture
def federation(server: PostgresqlServer, tmp_path: Path, request: pytest.FixtureRequest) -> Federation:
    """With two silos, a sum of PLAN, and a dump of that; `old.dump` beside its folder."""
    found = Federation(server, initialise(tmp_path / "net"), f"o{abs(hash(request.node.name)) % 10**9}")
    found.enrol(A, B)
    found.release(1)
    found.dump(tmp_path / "old.dump")
    return found


def put_back(federation: Federation) -> None:
    federation.put_back(federation.folder.root.parent / "old.dump")


def export(federation: Federation, name: str) -> Path:
    copy = federation.folder.root.parent / name
    done = federation.command("audit", "export", copy)
    assert done.code == 0, done.err
    return copy


def goes_on(federation: Federation) -> None:
    done = federation.command("invite", "clinic-z")
    assert done.code == 0, done.err


def test_an_edited_copy_of_the_ledger_is_refused_and_the_true_one_taken(federation: Federation) -> None:
    federation.release(2, 3)
    copy = export(federation, "copy")
    entries, _ = read_ledger((copy / "ledger").read_bytes(), "copy")
    forged = list(entries[:1])
    for entry in entries[1:]:
        less = replace(entry.release, noise_multiplier=1e9)
        forged.append(replace(entry, previous=forged[-1].digest, release=less))
    other = copy.with_name("forged")
    other.write_bytes(b"".join(entry.line() for entry in forged))
    other.chmod(0o600)
    put_back(federation)
    refused = federation.command("settle", "--log", copy, "--ledger", other)
    refused.is_refusal(IntegrityError, "has another entry 2 than the audit log tells of", "plans are closed")
    done = federation.command("settle", "--log", copy, "--ledger", copy / "ledger")
    assert done.code == 0, done.err
    assert Coordinator.load(federation.folder).releases.kept.entries() == entries


def test_a_folder_that_is_steps_ahead_of_the_log_is_settled_and_its_authorities_told(federation: Federation) -> None:
    """The key of the authority before is destroyed: nobody can go back to it."""
    for command in (("rotate",), ("activate", "--force"), ("retire", "--force"), ("rotate",)):
        done = federation.command("ca", *command)
        assert done.code == 0, (command, done.err)
        if command == ("rotate",) and not (federation.folder.root.parent / "later.dump").exists():
            federation.dump(federation.folder.root.parent / "later.dump")
    federation.put_back(federation.folder.root.parent / "later.dump")
    done = federation.command("settle", "--without-log")
    assert done.code == 0, done.err
    assert "tells of this folder's from here on: ca-2" in done.out
    goes_on(federation)
    told = list(federation.reading().of(Event.AUTHORITY_CHANGED))[-1]
    assert authorities_in_log.tells_of(told, Coordinator.load(federation.folder).keys.authorities)


def test_a_folder_with_the_authority_of_before_is_refused_before_anything_is_settled(federation: Federation) -> None:
    before = shutil.copytree(federation.folder.keys, federation.folder.root.parent / "keys before")
    assert federation.command("ca", "rotate").code == 0
    shutil.rmtree(federation.folder.keys)
    shutil.copytree(before, federation.folder.keys)
    federation.command("settle", "--without-log").is_refusal(ConfigurationError, "has other authorities", "copy all of")
    assert not [one for one in federation.reading().of(Event.OPERATOR_COMMAND) if one.text("command") == "settle"]


def test_entries_that_nobody_signed_stop_no_start_and_what_they_close_is_said(federation: Federation) -> None:
    """Whoever has the copy may go on from it: the chain needs no key."""
    assert federation.command("ca", "rotate").code == 0
    federation.release(2)
    copy = export(federation, "copy")
    log = AuditLog(copy, writer=read_log(copy).writer, key=new_identity_key(), clock=lambda: 4e9)
    log.append(Event.AUTHORITY_CHANGED, is_ca_9="issuing", certificate_ca_9="a" * 64)
    log.append(Event.PLAN_CLOSED, plan=OTHER_PLAN)
    put_back(federation)
    done = federation.command("settle", "--log", copy, "--ledger", copy / "ledger")
    assert done.code == 0, done.err
    assert f"closed: plan {OTHER_PLAN[:16]}" in done.out
    goes_on(federation)


def test_a_log_of_another_history_is_told_as_such_and_all_that_is_lost(federation: Federation) -> None:
    """The database was put back twice: of two timelines one has a revocation, and the other one is longer."""
    parted = len(federation.reading().entries)
    for number in range(4):
        assert federation.command("invite", f"clinic-{number}").code == 0
    federation.release(2)
    longer = export(federation, "longer")
    put_back(federation)
    assert federation.command("settle", "--without-log").code == 0
    assert federation.command("revoke", A).code == 0
    known = len(federation.reading().entries)
    assert known < len(read_log(longer).entries)
    put_back(federation)
    words = ("settle", "--log", longer, "--ledger", longer / "ledger")
    federation.command(*words).is_refusal(ConfigurationError, "is of another history", f"up to entry {known}")
    done = federation.command(*words, "--without-rest")
    assert done.code == 0, done.err
    assert f"whoever was revoked by entries {parted + 1} to {known}, which are lost, is in again" in done.out
    assert f"closed: plan {PLAN[:16]}" in done.out
    goes_on(federation)


def test_an_entry_that_is_gone_is_told_though_a_later_one_is_there(federation: Federation, tmp_path: Path) -> None:
    """The folder knows a revocation of the timeline that is lost; others see a later entry of the other one."""
    (tmp_path / "mount").mkdir(mode=0o700)
    settings, newest = federation.folder.settings, federation.folder.audit / "newest"
    settings.write_text(settings.read_text().replace('attempt_keys = ""', f'attempt_keys = "{tmp_path / "mount"}"'))
    assert federation.command("revoke", A).code == 0
    known = newest.read_bytes()
    put_back(federation)
    assert federation.command("settle", "--without-log").code == 0
    for number in range(4):
        assert federation.command("invite", f"clinic-{number}").code == 0
    longer = export(federation, "longer")
    assert ChainedRow.of(newest.read_bytes(), "").sequence > ChainedRow.of(known, "").sequence
    newest.write_bytes(known)
    put_back(federation)
    words = ("settle", "--log", longer, "--ledger", longer / "ledger")
    federation.command(*words).is_refusal(ConfigurationError, "is of another history", "would be let in again")


def test_every_plan_that_released_since_is_closed_where_its_sums_are_lost(federation: Federation) -> None:
    """Not only that of the newest sum: the folder knows all of them."""
    early = export(federation, "early")
    federation.release(1, plan=OTHER_PLAN)
    federation.release(2)
    put_back(federation)
    done = federation.command("settle", "--log", early, "--ledger", early / "ledger", "--without-rest")
    assert done.code == 0, done.err
    for plan in (PLAN, OTHER_PLAN):
        assert f"closed: plan {plan[:16]}" in done.out
        with pytest.raises(BudgetSpent, match="came from a backup"):
            federation.release(7, plan=plan)


def test_a_settling_that_was_cut_off_at_its_end_is_settled_again_as_it_was(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the log is what the folder knows, and before the ledger is."""
    federation.release(2)
    copy = export(federation, "copy")
    put_back(federation)
    words = ("settle", "--log", copy, "--ledger", copy / "ledger")
    forget, calls = ChainedRows.forget, []

    def cut_off(rows: ChainedRows) -> None:
        calls.append(rows)
        if len(calls) == 2:
            raise Killed
        forget(rows)

    with monkeypatch.context() as patched:
        patched.setattr(ChainedRows, "forget", cut_off)
        with pytest.raises(Killed):
            federation.command(*words)
    for _ in range(2):
        done = federation.command(*words)
        assert done.code == 0, done.err
        assert "closed:" not in done.out
    federation.release(3)
    with leading(Coordinator.load(federation.folder)) as leader:
        assert [one.round for one in leader.releases.kept.entries()] == [1, 2, 3]
