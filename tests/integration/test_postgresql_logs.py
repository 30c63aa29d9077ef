"""Audit log and ledger of releases as rows: what holds of files holds of them, whatever is done to rows is found, and
another coordinator goes on with them.

Both makers are put through the same: files of a folder, rows of a database.
"""

import json
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, delete, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from lorica.demo.ports import free_ports
from lorica_coordinator import cli
from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow, ChainedRows
from lorica_coordinator.edges.database.postgresql.leadership import Leadership, read_only
from lorica_coordinator.edges.database.postgresql.log_rows import LogRows
from lorica_coordinator.edges.database.postgresql.newest import SharedNewest
from lorica_coordinator.edges.database.postgresql.place import DatabasePlace
from lorica_coordinator.edges.database.postgresql.release_rows import ReleaseRows
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.round_tables import (
    ADDED_TO,
    audit_log,
    closed_plans,
    release_ledger,
    release_root,
)
from lorica_coordinator.edges.database.sealing.root_seal import RootSeal
from lorica_coordinator.edges.server.audited import released
from lorica_coordinator.edges.sums.kept_releases import FolderReleases, KeptReleases
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.upkeep.newest_in_log import newest_groups, newest_told
from lorica_coordinator.edges.upkeep.taken_up import take_up
from lorica_coordinator.service.ports import Overtaken
from lorica_coordinator.service.unusable import BudgetSpent
from lorica_coordinator.vectors.key_place import marked
from lorica_security.audit.chain import Head
from lorica_security.audit.entry import LOCAL, Entry, Event, entry_from_line
from lorica_security.audit.signed_head import SignedHead
from lorica_security.audit.verification import SEAL_EVERY, SEAL_WITHIN_S, Known
from lorica_security.errors import ConfigurationError, IntegrityError, StateError, StorageError
from lorica_security.host.files import write_private
from lorica_security.identifiers import FederationName
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.on_disk.log_file import AuditLog, LogFiles
from lorica_security.on_disk.log_place import LogPlace
from lorica_security.on_disk.reading import Reading, read_log
from lorica_security.privacy.ledger import check_head, head_of, next_entry, read_ledger
from silo_wire.canonical import Digest, digest_of
from silo_wire.plans.privacy import PrivacySection
from tests.integration.test_postgresql_leadership import coordinator, until
from tests.support.command_line import run_command
from tests.support.coordinator_edges import round_key
from tests.support.postgresql import SUPERUSER, PostgresqlServer, running_postgresql
from tests.support.rounds import FEDERATION

KEY = new_identity_key()
IDENTITY = "ab" * 32
WRITER = f"spiffe://{FEDERATION}/coordinator"
PLAN, OTHER_PLAN = Digest("a" * 64), Digest("b" * 64)
PRIVATE = PrivacySection(
    level="silo", noise_multiplier=4.0, target_epsilon=8.0, dp_delta=1e-5, nominal_silos=10, max_noise_to_signal=1e6
)
((_, RELEASE),) = PRIVATE.releases_of_round(weighted=False)
FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


@pytest.fixture(scope="module")
def database(server: PostgresqlServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresqlDatabase]:
    folder = tmp_path_factory.mktemp("settings")
    made = PostgresqlDatabase(
        DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/postgres?host={server.folder}", folder)
    )
    SqlRoundStore(made, FEDERATION)
    yield made
    made.engine.dispose()


def no_fence(connection: Any) -> None:
    """Of who leads alone."""


def by_its_owner(database: PostgresqlDatabase, *statements: Any) -> None:
    """As who can write the database does it: its refusals are switched off."""
    with database.engine.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def empty(database: PostgresqlDatabase) -> PostgresqlDatabase:
    by_its_owner(database, *(delete(table) for table in ADDED_TO))
    return database


class Place:
    """One coordinator's folder and, of rows, its database; `shared`: what it has in a folder with others."""

    def __init__(
        self, folder: Path, database: PostgresqlDatabase | None, fence: Any = no_fence, shared: Path | None = None
    ) -> None:
        self.folder, self.database, self.fence, self.clock = folder, database, fence, Clock()
        self.shared = shared

    def newest(self, name: str) -> SharedNewest | None:
        return None if self.shared is None else SharedNewest(self.shared / name, self.shared.parent)

    def log_place(self, fence: Any = None) -> LogPlace:
        if self.database is None:
            return LogFiles(self.folder / "audit")
        rows = ChainedRows(
            self.database, audit_log, fence or self.fence, self.folder / "audit" / "newest", self.newest("audit")
        )
        return LogRows(rows, self.folder / "audit", writer=WRITER, key=KEY.public_key())

    def log(self) -> AuditLog:
        """Of another process."""
        return AuditLog(self.log_place(), writer=WRITER, key=KEY, clock=self.clock)

    def kept(self, fence: Any = None) -> KeptReleases:
        if self.database is None:
            return FolderReleases(self.folder / "privacy")
        rows = ChainedRows(
            self.database,
            release_ledger,
            fence or self.fence,
            self.folder / "privacy" / "newest",
            self.newest("privacy"),
        )
        return ReleaseRows(rows, RootSeal(KEY, FEDERATION))

    def releases(self, log: AuditLog | None = None) -> ReleaseLedger:
        tell: Any = {} if log is None else {"tell": released(log)}
        return ReleaseLedger(self.folder / "privacy", clock=self.clock, kept=self.kept(), **tell)

    def read(self) -> Reading:
        return read_log(self.log_place(), writer=WRITER, keys=[KEY.public_key()])


@pytest.fixture(params=["files", "rows"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(tmp_path, request.getfixturevalue("empty") if request.param == "rows" else None)


@pytest.fixture
def rows(empty: PostgresqlDatabase, tmp_path: Path) -> Place:
    return Place(tmp_path, empty)


# --- the log, in both


def test_what_was_entered_is_sealed_verifies_and_goes_on(place: Place) -> None:
    log = place.log()
    head = log.append(Event.STARTED, round=3, detail="two\nlines é")
    log.seal()
    log.seal()  # nothing is left to sign
    for number in range(SEAL_EVERY):
        place.log().append(Event.REFUSED, round=number)
    place.clock.now += SEAL_WITHIN_S
    log.seal_if_due()
    log.append(Event.STOPPED)
    reading = place.read()
    assert [entry.event for entry in reading.entries][:2] == [Event.STARTED, Event.SEALED]
    seals = 2 if place.database is None else SEAL_EVERY + 2  # in rows each transaction has one
    assert sum(entry.event is Event.SEALED for entry in reading.entries) == seals
    assert reading.walk.digest_of(head.sequence) == head.digest
    assert log.signed_head().head == place.log().head() == reading.walk.position.head
    place.clock.now -= 100_000
    place.log().append(Event.STARTED)
    assert place.read().walk.clock_went_back == 1


def test_both_have_the_same_bytes(empty: PostgresqlDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files are as small as transactions."""
    monkeypatch.setattr(secrets, "token_hex", lambda count: "5a" * count)
    said = []
    for where in (None, empty):
        place = Place(tmp_path, where)
        log = place.log() if where else place.log().in_place(LogFiles(tmp_path / "audit", segment_bytes=1))
        for number in range(SEAL_EVERY):
            log.append(Event.REFUSED, who=f"10.0.0.{number}", detail="\U0001f600%")
        log.seal()
        said.append([line.content for line in place.log_place().lines()])
        if where is None:
            (tmp_path / "audit").rename(tmp_path / "before")
    assert said[0] == said[1]
    assert len(said[0]) == 2 * SEAL_EVERY


def test_one_that_goes_on_elsewhere_is_followed_by_one_that_was_there(place: Place) -> None:
    """A command beside the daemon, or what others added since."""
    one, other = place.log(), place.log()
    for turn in range(6):
        (one if turn % 2 else other).append(Event.REFUSED, round=turn)
    other.seal()
    one.append(Event.STOPPED)
    entries = [entry for entry in place.read().entries if entry.event is not Event.SEALED]
    assert [entry.details.get("round") for entry in entries] == [*range(6), None]


def test_entries_that_say_something_are_found_newest_first(place: Place) -> None:
    log = place.log()
    for number, groups in ((1, "a, b, c"), (2, "a, b; c, d")):
        log.append(Event.GROUPS_STAND, number=number, digest=f"{number}" * 64, groups=groups)
        log.append(Event.REFUSED, detail=f'"{Event.GROUPS_STAND.value}"')
    found = newest_groups(newest_told(log.place))
    assert found is not None
    assert (found.number, found.groups) == (2, (("a", "b"), ("c", "d")))


def test_an_empty_one_is_named(place: Place) -> None:
    with pytest.raises(StateError, match="holds no audit log"):
        place.read()


# --- what is done to rows


LAST = 22


def tampered(database: PostgresqlDatabase, done: str, at: int, by: int) -> None:
    row, table = audit_log.c.sequence == at, audit_log
    statements: dict[str, Sequence[Any]] = {
        "deleted": [delete(table).where(row)],
        "cut": [delete(table).where(audit_log.c.sequence >= at)],
        "beginning cut": [delete(table).where(audit_log.c.sequence <= at)],
        "edited": [table.update().where(row).values(line=text("replace(line, '10.0.0', '10.0.9')"))],
        "edited blindly": [table.update().where(row).values(line=text(f"overlay(line placing 'z' from {by + 1})"))],
        "number": [table.update().where(row).values(sequence=1000 + by)],
        "predecessor": [table.update().where(row).values(previous="f" * 64)],
        "emptied": [table.update().where(row).values(line="")],
        "not text": [table.update().where(row).values(line=text("line || '\u00e9'"))],
        "exchanged": [
            text(
                f"UPDATE audit_log a SET line = b.line FROM audit_log b WHERE a.sequence IN ({at}, {at + 1}) "
                f"AND b.sequence = {2 * at + 1} - a.sequence"
            )
        ],
        "repeated": [
            text(f"INSERT INTO audit_log SELECT {LAST + 1}, repeat('f', 64), line FROM audit_log WHERE sequence = {at}")
        ],
    }
    by_its_owner(database, *statements[done])


TAMPERED = st.sampled_from(
    ["deleted", "cut", "beginning cut", "edited", "edited blindly", "number", "predecessor", "emptied", "not text",
     "exchanged", "repeated"]
)  # fmt: skip


@FEW
@given(done=TAMPERED, at=st.integers(1, LAST), by=st.integers(0, 150))
@example(done="cut", at=LAST, by=0)
@example(done="number", at=LAST, by=0)
@example(done="beginning cut", at=LAST, by=0)
def test_whatever_is_done_to_the_rows_is_found(
    database: PostgresqlDatabase, tmp_path: Path, done: str, at: int, by: int
) -> None:
    """By who verifies with what a silo holds, and by the coordinator when it begins to lead."""
    by_its_owner(database, *(delete(table) for table in ADDED_TO))
    (tmp_path / "audit" / "newest").unlink(missing_ok=True)
    place = Place(tmp_path, database)
    log = place.log()
    for number in range(10):
        log.append(Event.REFUSED, who=f"10.0.0.{number}")
    head = log.append(Event.STOPPED)
    assert head.sequence == LAST
    before = [line.content for line in place.log_place().lines()]
    tampered(database, done, at, by)
    if [_row_text(row) for row in _rows(database)] == [_row_text(row) for row in _expected(before)]:
        return  # a letter in place of itself
    nothing_left = (done, at) in (("cut", 1), ("beginning cut", LAST))
    with pytest.raises(StateError if nothing_left else IntegrityError):
        place.read().walk.check_known([Known(head=head, by="a silo")], "the log")
    if done in ("deleted", "cut", "beginning cut", "emptied", "number", "predecessor", "not text") and at == LAST:
        with pytest.raises(IntegrityError, match=r"newest|edited|no entry"):
            take_up(place.log(), place.releases())


def _rows(database: PostgresqlDatabase) -> list[Any]:
    with database.engine.connect() as connection:
        return list(connection.execute(audit_log.select().order_by(audit_log.c.sequence)).all())


def _row_text(row: Any) -> tuple[int, str, str]:
    return row[0], row[1], row[2]


def _expected(lines: Sequence[bytes]) -> list[tuple[int, str, str]]:
    entries = [entry_from_line(line, "") for line in lines]
    return [(one.sequence, one.previous, one.line().decode().rstrip("\n")) for one in entries]


def test_the_server_itself_refuses_to_change_or_delete_rows(rows: Place, database: PostgresqlDatabase) -> None:
    rows.log().append(Event.STARTED)
    for statement in ("UPDATE audit_log SET line = ''", "DELETE FROM audit_log", "TRUNCATE audit_log"):
        with (
            pytest.raises(SQLAlchemyError, match="rows of audit_log are never changed"),
            database.engine.begin() as one,
        ):
            one.execute(text(statement))


def test_a_database_that_was_put_back_under_a_running_coordinator_is_not_gone_on_with(rows: Place) -> None:
    assert rows.database is not None
    log = rows.log()
    for _ in range(3):
        log.append(Event.REFUSED)
    by_its_owner(rows.database, delete(audit_log).where(audit_log.c.sequence > 1))
    with pytest.raises(IntegrityError, match="has not the entry 6 that this process knows"):
        log.append(Event.STOPPED)
    assert len(rows.read().entries) == 1


def test_an_older_dump_is_told_from_what_the_folder_knows(rows: Place) -> None:
    assert rows.database is not None
    log = rows.log()
    log.append(Event.STARTED)
    rows.releases(log).enter(round_key(PLAN), b"sum 1", PRIVATE)
    by_its_owner(rows.database, delete(release_ledger))
    with pytest.raises(IntegrityError, match=r"release_ledger has no entry 1, which .*/privacy/newest has"):
        take_up(rows.log(), rows.releases())
    (rows.folder / "privacy" / "newest").unlink()
    take_up(rows.log(), rows.releases())
    by_its_owner(rows.database, delete(audit_log).where(audit_log.c.sequence > 2))
    with pytest.raises(IntegrityError, match=r"audit_log has no entry 4, which .*/audit/newest has: rows were deleted"):
        take_up(rows.log(), rows.releases())


def test_a_command_adds_nothing_to_an_older_database_and_the_folder_keeps_what_it_knows(rows: Place) -> None:
    """It is another process than the leader, and knows nothing itself."""
    assert rows.database is not None
    for _ in range(3):
        rows.log().append(Event.REFUSED)
    place, newest = rows.log_place(), rows.folder / "audit" / "newest"
    assert isinstance(place, LogRows)
    lines, known = place.rows.last(6), newest.read_bytes()
    by_its_owner(rows.database, delete(audit_log).where(audit_log.c.sequence > 4))
    with pytest.raises(IntegrityError, match=r"audit_log has no entry 6, which .*/audit/newest has"):
        rows.log().append(Event.OPERATOR_COMMAND, command="ca export")
    forked = rows.log().in_place(rows.log_place())
    with pytest.raises(IntegrityError, match="has no entry 6"):
        place.rows.append(lines[4:], newest=lines[5])
    with pytest.raises(IntegrityError, match="has no entry 6"):
        forked.head()
    place.rows.remember(lines[3])
    assert newest.read_bytes() == known
    assert len(_rows(rows.database)) == 4


def put_in(place: Place, done: str) -> list[bytes]:
    """Lines that whoever can INSERT makes of all that is public: the log, its seals, and heads that silos were given."""
    log = place.log()
    head = log.head()
    clock = int(place.clock.now)

    def entry(after: Head, event: Event, who: str = LOCAL, **details: Any) -> Entry:
        return Entry(
            sequence=after.sequence + 1, previous=after.digest, at=clock, event=event, who=who, details=details,
            salt="5a" * 16,
        )  # fmt: skip

    forged = entry(head, Event.OPERATOR_COMMAND, command="Revoke", asked_name="a", asked_role="silo")
    signatures = {
        "a seal of another key": SignedHead.sign(new_identity_key(), writer=WRITER, head=forged.head),
        "a seal of another entry": log.signed_head(),
        "a seal of another log": SignedHead.sign(KEY, writer=f"spiffe://{FEDERATION}/silo/a", head=forged.head),
    }
    if done == "an entry":
        return [forged.line()]
    if done == "entries without end":
        many = [forged]
        for _ in range(2 * SEAL_EVERY):
            many.append(entry(many[-1].head, Event.REFUSED))
        return [one.line() for one in many]
    if done == "a head that a silo was given":
        signed = log.signed_head()
        return [entry(head, Event.SEALED, WRITER, signature=signed.signature.hex()).line()]
    seal = entry(forged.head, Event.SEALED, WRITER, signature=signatures[done].signature.hex())
    return [forged.line(), seal.line()]


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    "done",
    ["an entry", "entries without end", "a seal of another key", "a seal of another entry", "a seal of another log",
     "a head that a silo was given"],
)  # fmt: skip
def test_what_somebody_without_the_key_puts_in_is_not_gone_on_from(rows: Place, done: str, running: bool) -> None:
    assert rows.database is not None
    log = rows.log()
    log.append(Event.STARTED)
    log.append(Event.REFUSED)
    lines = put_in(rows, done)
    with rows.database.engine.begin() as connection:  # no right but to add
        for row in (ChainedRow.of(line, "") for line in lines):
            line = row.content.decode().rstrip()
            connection.execute(audit_log.insert().values(sequence=row.sequence, previous=row.previous, line=line))
    writer = log if running else rows.log()
    with pytest.raises(IntegrityError, match=r"put in|is no seal of"):
        writer.append(Event.STOPPED)
    with pytest.raises(IntegrityError, match=r"put in|is no seal of"):
        take_up(rows.log(), rows.releases())
    assert len(_rows(rows.database)) == 4 + len(lines), "nothing was signed behind it"


# --- the ledger, in both


def test_a_release_is_entered_once_and_adds_up(place: Place) -> None:
    releases = place.releases()
    assert releases.kept.entries() == ()
    for _ in range(2):
        assert releases.enter(round_key(PLAN), b"sum 1", PRIVATE)
    place.releases().enter(round_key(PLAN, 2), b"sum 2", PRIVATE)
    place.releases().enter(round_key(OTHER_PLAN), b"sum 1", PRIVATE)
    entries = place.kept().entries()
    assert [(entry.plan, entry.round) for entry in entries] == [(PLAN, 1), (PLAN, 2), (OTHER_PLAN, 1)]
    check_head(entries, head_of(entries[:2]), where="the ledger", by="this test")


def test_a_closed_plan_stays_closed(place: Place) -> None:
    place.releases().close([PLAN])
    place.releases().close([OTHER_PLAN, PLAN])
    assert place.kept().closed() == {PLAN, OTHER_PLAN}
    with pytest.raises(BudgetSpent, match="came from a backup"):
        place.releases().enter(round_key(PLAN), b"sum 1", PRIVATE)


def test_noise_is_made_from_one_root(place: Place) -> None:
    key = place.releases().noise_key(b"sum 1")
    assert place.releases().noise_key(b"sum 1") == key
    place.releases().enter(round_key(PLAN), b"sum 1", PRIVATE)
    if place.database is None:
        (place.folder / "privacy" / "root").unlink()
    else:
        assert not list(place.folder.rglob("root"))
        by_its_owner(place.database, delete(release_root))
    with pytest.raises(IntegrityError, match="is missing beside a ledger of releases"):
        place.releases().noise_key(b"sum 1")


def test_the_root_of_noise_is_sealed_for_the_same_identity_key_alone(rows: Place, server: PostgresqlServer) -> None:
    rows.releases().noise_key(b"sum 1")
    root = rows.kept().root()
    assert root is not None
    ((sealed,),) = server.rows("SELECT sealed FROM release_root")
    assert isinstance(sealed, bytes)
    assert root not in sealed
    assert RootSeal(KEY, FEDERATION).seal(root) != RootSeal(KEY, FEDERATION).seal(root), "each under a nonce of its own"
    rows.kept().keep_root(bytes(32))
    assert rows.kept().root() == root, "the first one stays"
    for seal, opened in (
        (RootSeal(new_identity_key(), FEDERATION), sealed),
        (RootSeal(KEY, FederationName("elsewhere")), sealed),
        (RootSeal(KEY, FEDERATION), bytes([sealed[0] ^ 1]) + sealed[1:]),
        (RootSeal(KEY, FEDERATION), sealed[:-1]),
        (RootSeal(KEY, FEDERATION), b""),
    ):
        with pytest.raises(IntegrityError, match="the rows was not sealed by this coordinator's identity key"):
            seal.open(opened, "the rows")


RELEASES_TAMPERED = st.sampled_from(["deleted", "cut", "edited", "exchanged", "beginning cut", "number"])


@FEW
@given(done=RELEASES_TAMPERED, at=st.integers(1, 4))
def test_whatever_is_done_to_the_ledgers_rows_is_found_before_another_sum(
    database: PostgresqlDatabase, tmp_path: Path, done: str, at: int
) -> None:
    """By a coordinator elsewhere as well, whose folder knows nothing: the log tells."""
    by_its_owner(database, *(delete(table) for table in ADDED_TO))
    for newest in tmp_path.rglob("newest"):
        newest.unlink()
    place, table = Place(tmp_path, database), release_ledger
    log = place.log()
    place.releases().noise_key(b"")
    for number in range(1, 5):
        key = round_key(PLAN, number)
        place.releases(log).enter(key, b"sum %d" % number, PRIVATE)
        log.append(Event.ROUND_CLOSED, plan=PLAN, round=number, attempt=1, outcome="applied")
    row = table.c.sequence == at
    statements: dict[str, Any] = {
        "deleted": delete(table).where(row),
        "cut": delete(table).where(table.c.sequence >= at),
        "beginning cut": delete(table).where(table.c.sequence <= at),
        "edited": table.update().where(row).values(line=text("replace(line, 'round', 'rOund')")),
        "number": table.update().where(row).values(sequence=9),
        "exchanged": text(
            f"UPDATE release_ledger a SET line = b.line FROM release_ledger b WHERE a.sequence IN ({at}, {at % 4 + 1}) "
            f"AND b.sequence = {at + at % 4 + 1} - a.sequence"
        ),
    }
    elsewhere = Place(tmp_path / "elsewhere", database)
    take_up(elsewhere.log(), elsewhere.releases())
    (elsewhere.folder / "privacy" / "newest").unlink()
    by_its_owner(database, statements[done])
    with pytest.raises(IntegrityError):
        take_up(elsewhere.log(), elsewhere.releases())


OTHER_SUM = {"ledger_digest": "c" * 64, "ledger_subject": "d" * 64}


@pytest.mark.parametrize("closes", [False, True])
def test_a_kill_between_log_and_ledger_is_told_from_an_entry_that_is_gone(rows: Place, closes: bool) -> None:
    log = rows.log()
    rows.releases().noise_key(b"")
    rows.releases(log).enter(round_key(PLAN), b"sum 1", PRIVATE)
    told = next(iter(rows.read().of(Event.SUM_RELEASED)))
    log.append(Event.SUM_RELEASED, **{**told.details, "ledger_entry": 2, "round": 2, **OTHER_SUM})
    if closes:
        log.append(Event.ROUND_CLOSED, plan=PLAN, round=2, attempt=1, outcome="applied")
        with pytest.raises(
            IntegrityError, match=r"has not the entry 2 that the audit log tells of .*would be forgotten"
        ):
            take_up(rows.log(), rows.releases())
        rows.releases().close([PLAN])
    take_up(rows.log(), rows.releases())
    if not closes:
        assert rows.releases(rows.log()).enter(round_key(PLAN, 2), b"sum 2", PRIVATE)
        take_up(rows.log(), rows.releases())


@pytest.mark.parametrize("knows", ["process", "folder"])
def test_a_ledger_that_is_cut_under_a_running_coordinator_releases_nothing_more(rows: Place, knows: str) -> None:
    assert rows.database is not None
    releases, newest = rows.releases(), rows.folder / "privacy" / "newest"
    for number in (1, 2, 3):
        releases.enter(round_key(PLAN, number), b"sum %d" % number, PRIVATE)
    known = newest.read_bytes()
    by_its_owner(rows.database, delete(release_ledger).where(release_ledger.c.sequence > 1))
    if knows == "process":
        newest.unlink()
    else:
        releases = rows.releases()
    for _ in range(2):
        with pytest.raises(IntegrityError, match=r"release_ledger has no entry 3, which .* has: rows were deleted"):
            releases.enter(round_key(PLAN, 4), b"sum 4", PRIVATE)
        with pytest.raises(IntegrityError, match="has no entry 3"):
            releases.kept.entries()  # what was spent is not told either
    write_private(newest, known)
    assert isinstance(releases.kept, ReleaseRows)
    (first,) = releases.kept.rows.last(1)
    forked = next_entry(read_ledger(first.content, "")[0], round_key(PLAN, 4), "delta", RELEASE, at=1)
    with pytest.raises(IntegrityError, match="has no entry 3"):
        releases.kept.append([forked])
    assert newest.read_bytes() == known
    assert len(releases.kept.rows.last(9)) == 1


def test_every_sum_whose_round_was_closed_is_held_to_the_ledger(rows: Place) -> None:
    """Also one whose number another sum was given since, by a coordinator whose folder did not know."""
    assert rows.database is not None
    log = rows.log()
    rows.releases().noise_key(b"")
    for number in (1, 2, 3):
        if number == 3:
            by_its_owner(rows.database, delete(release_ledger).where(release_ledger.c.sequence == 2))
            (rows.folder / "privacy" / "newest").unlink()
        rows.releases(log).enter(round_key(PLAN, number), b"sum %d" % number, PRIVATE)
        log.append(Event.ROUND_CLOSED, plan=PLAN, round=number, attempt=1, outcome="applied")
    assert [entry.round for entry in rows.kept().entries()] == [1, 3]
    with pytest.raises(IntegrityError, match=r"has not the entry 2 that the audit log tells of .* round 2\)"):
        take_up(rows.log(), rows.releases())


@pytest.mark.parametrize("subject", ["the same sum", "another sum"])
def test_an_entry_that_landed_late_is_found_by_its_subject(rows: Place, subject: str) -> None:
    """The answer to its COMMIT was lost, and it was told of anew; another sum of the same attempt is not it."""
    log = rows.log()
    rows.releases().noise_key(b"")
    of = {"subject": digest_of(b"the same sum")}
    landed = next_entry((), round_key(PLAN), "delta", RELEASE, at=1, **of)
    anew = next_entry((), round_key(PLAN), "delta", RELEASE, at=2, subject=digest_of(subject.encode()))
    for entry in (landed, anew):
        released(log)(entry)
    rows.kept().append([landed])
    log.append(Event.ROUND_CLOSED, plan=PLAN, round=1, attempt=1, outcome="applied")
    if subject == "the same sum":
        take_up(rows.log(), rows.releases())
    else:
        with pytest.raises(IntegrityError, match="epsilon that was spent would be forgotten"):
            take_up(rows.log(), rows.releases())


def test_a_plan_that_was_closed_does_not_open_again(rows: Place) -> None:
    assert rows.database is not None
    rows.releases().close([PLAN])
    for _ in range(2):
        take_up(rows.log(), rows.releases())
    assert [entry.text("plan") for entry in rows.read().of(Event.PLAN_CLOSED)] == [PLAN]
    running = rows.releases()
    assert running.closed() == {PLAN}
    by_its_owner(rows.database, delete(closed_plans))
    with pytest.raises(IntegrityError, match=r"has not the plan a{16} any more"):
        running.enter(round_key(PLAN), b"sum 1", PRIVATE)
    with pytest.raises(IntegrityError, match=r"plan a{16} is not closed any more, though the audit log tells"):
        take_up(rows.log(), rows.releases())


# --- two coordinators


class Candidate:
    """A coordinator with a folder of its own, without the process."""

    def __init__(
        self, database: PostgresqlDatabase, place: DatabasePlace, folder: Path, shared: Path | None = None
    ) -> None:
        self.leadership = Leadership(place, database, FEDERATION, IDENTITY, session_s=60.0, beat_s=60.0)
        self.place = Place(folder, database, self.leadership.fence, shared)

    def lead(self) -> None:
        assert self.leadership.take(lambda: None)
        take_up(self.place.log(), self.place.releases())


@pytest.fixture
def pair(empty: PostgresqlDatabase, server: PostgresqlServer, tmp_path: Path) -> Iterator[tuple[Candidate, Candidate]]:
    place = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/postgres?host={server.folder}", tmp_path)
    both = [Candidate(empty, place, tmp_path / name) for name in ("first", "second")]
    yield both[0], both[1]
    for one in both:
        one.leadership.release()


def test_a_second_coordinator_with_a_folder_of_its_own_goes_on(pair: tuple[Candidate, Candidate]) -> None:
    first, second = pair
    first.lead()
    log = first.place.log()
    log.append(Event.STARTED)
    noise = first.place.releases(log).noise_key(b"sum 1")
    first.place.releases(log).enter(round_key(PLAN), b"sum 1", PRIVATE)
    first.leadership.release()
    FolderReleases(second.place.folder / "privacy").keep_root(bytes(32))
    with pytest.raises(IntegrityError, match=r"second/privacy/root is another root than .* has noise from"):
        second.lead()
    second.leadership.release()
    (second.place.folder / "privacy" / "root").unlink()
    second.lead()
    ours = second.place.log()
    ours.append(Event.STARTED)
    ours.seal()
    releases = second.place.releases(ours)
    assert releases.noise_key(b"sum 1") == noise
    releases.enter(round_key(PLAN), b"sum 1", PRIVATE)
    assert len(releases.kept.entries()) == 1, "the first one's release is known"
    assert [entry.event for entry in second.place.read().entries if entry.event is not Event.SEALED] == [
        Event.STARTED, Event.SUM_RELEASED, Event.STARTED,
    ]  # fmt: skip


def test_a_stale_leader_appends_nothing(pair: tuple[Candidate, Candidate], server: PostgresqlServer) -> None:
    first, second = pair
    first.lead()
    log, releases = first.place.log(), first.place.releases()
    log.append(Event.STARTED)
    server.rows("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'")
    second.lead()
    before = [_rows(second.place.database)] if second.place.database else []
    for stale in (
        lambda: log.append(Event.STOPPED),
        lambda: first.place.log().append(Event.STOPPED),
        lambda: releases.kept.append([]) or releases.enter(round_key(PLAN), b"sum 1", PRIVATE),
        lambda: releases.close([PLAN]),
        lambda: releases.noise_key(b"sum 1"),
    ):
        with pytest.raises(Overtaken):
            stale()
    assert second.place.database
    assert before == [_rows(second.place.database)]
    assert second.place.kept().entries() == ()
    second.place.log().append(Event.STARTED)


@pytest.fixture
def sharing(
    empty: PostgresqlDatabase, server: PostgresqlServer, tmp_path: Path
) -> Iterator[tuple[Candidate, Candidate]]:
    """Whose folders are empty at each start, and who share one for keys."""
    place = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/postgres?host={server.folder}", tmp_path)
    (tmp_path / "mount").mkdir(mode=0o700)
    marked(tmp_path / "mount", "")
    shared = tmp_path / "mount" / IDENTITY
    both = [Candidate(empty, place, tmp_path / name, shared) for name in ("first", "second")]
    yield both[0], both[1]
    for one in both:
        one.leadership.release()


def test_a_successor_with_an_empty_folder_refuses_an_older_database(sharing: tuple[Candidate, Candidate]) -> None:
    first, second = sharing
    database = first.place.database
    assert database is not None
    first.lead()
    log = first.place.log()
    log.append(Event.STARTED)
    log.seal()
    first.place.releases(log).enter(round_key(PLAN), b"sum 1", PRIVATE)
    log.append(Event.STOPPED)
    log.seal()
    newest = len(first.place.read().entries)
    first.leadership.release()
    shutil.rmtree(first.place.folder)
    by_its_owner(database, delete(release_ledger))
    with pytest.raises(IntegrityError, match=rf"release_ledger has no entry 1, which .*/mount/{IDENTITY}/privacy/1-"):
        second.lead()
    second.leadership.release()
    by_its_owner(database, delete(audit_log).where(audit_log.c.sequence > 2))
    with pytest.raises(
        IntegrityError, match=rf"audit_log has no entry {newest}, which .*/audit/{newest}-[0-9a-f]* has"
    ):
        second.lead()
    second.leadership.release()
    for name in ("audit", "privacy"):
        shared = second.place.newest(name)
        assert shared is not None
        shared.forget()  # which `settle` does
    second.lead()


def test_nothing_is_sealed_or_released_whose_newest_cannot_be_kept(sharing: tuple[Candidate, Candidate]) -> None:
    """The mount is away: a row that only this process knows of would not be missed."""
    first, _ = sharing
    first.lead()
    log = first.place.log()
    log.append(Event.STARTED)
    mount = first.place.folder.parent / "mount"
    mount.chmod(0o750)
    with pytest.raises(ConfigurationError, match="mount has mode 0750"):
        log.append(Event.STOPPED)
    mount.chmod(0o700)
    shutil.rmtree(first.place.folder.parent / "mount")
    with pytest.raises(StorageError, match="/mount"):
        log.append(Event.STOPPED)
    with pytest.raises(StorageError, match="/mount"):
        first.place.releases().enter(round_key(PLAN), b"sum 1", PRIVATE)
    assert [entry.event for entry in first.place.read().entries] == [Event.STARTED, Event.SEALED]
    assert first.place.kept().entries() == ()
    assert not (first.place.folder.parent / "mount").exists()


def test_what_is_in_the_rows_is_entered_though_its_file_cannot_be_written(
    sharing: tuple[Candidate, Candidate], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk of the shared folder is full: who was revoked is, and who starts leads. It is told each time."""
    first, second = sharing
    first.lead()
    log, real = first.place.log(), SharedNewest.keep

    def full(*arguments: object) -> None:
        raise StorageError("audit cannot be written: No space left on device: free some space on its disk")

    monkeypatch.setattr(SharedNewest, "keep", full)
    log.append(Event.OPERATOR_COMMAND, command="revoke")
    first.place.releases(log).enter(round_key(PLAN), b"sum 1", PRIVATE)
    assert Event.OPERATOR_COMMAND in [entry.event for entry in first.place.read().entries]
    assert len(first.place.kept().entries()) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if "is kept in the database alone" in line]
    assert len(said) >= 2
    assert all("free some space" in line for line in said)
    first.leadership.release()
    second.lead()
    monkeypatch.setattr(SharedNewest, "keep", real)
    second.place.log().append(Event.STARTED)
    shared = second.place.newest("audit")
    assert shared is not None
    (known,) = shared.known()
    assert known[0].name.startswith(f"{len(second.place.read().entries)}-")


def test_what_one_place_cannot_be_told_the_other_knows(
    sharing: tuple[Candidate, Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = sharing
    first.lead()
    log, shared = first.place.log(), first.place.newest("audit")
    assert shared is not None
    log.append(Event.STARTED)
    lock = first.place.folder / "audit" / "newest.lock"
    lock.unlink()
    lock.mkdir()  # none that can be written
    log.append(Event.STOPPED)
    end = len(first.place.read().entries)
    ((path, _),) = shared.known()
    assert path.name.startswith(f"{end}-")
    lock.rmdir()

    def full(*_: object) -> None:
        raise StorageError("audit cannot be written: No space left on device")

    monkeypatch.setattr(SharedNewest, "keep", full)
    log.append(Event.STARTED)
    newest = ChainedRow.of((first.place.folder / "audit" / "newest").read_bytes(), "newest")
    assert newest.sequence == len(first.place.read().entries) > end


def test_who_does_not_lead_only_looks(pair: tuple[Candidate, Candidate]) -> None:
    first, second = pair
    first.lead()
    first.place.log().append(Event.STARTED)
    looker = AuditLog(second.place.log_place(read_only), writer=WRITER, key=KEY, clock=Clock())
    assert looker.signed_head().head.sequence == 2
    with pytest.raises(StorageError, match="it is read-only"):
        looker.append(Event.STOPPED)


def test_a_log_that_two_add_to_at_once_has_one_line_after_another(rows: Place) -> None:
    """Whoever they are: two with the same lease, a command, or an answer that was lost."""
    logs = [rows.log() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda log: [log.append(Event.REFUSED) for _ in range(5)], logs))
    reading = rows.read()
    assert sum(entry.event is Event.REFUSED for entry in reading.entries) == 20


def test_what_another_adds_while_a_transaction_has_begun_is_no_row_that_was_deleted(rows: Place) -> None:
    """The folder knows the other's row before this one sees it: what a transaction sees is of its begin."""
    others, adding, met = rows.log(), [False], []

    def fence(connection: Connection) -> None:
        connection.execute(select(func.count()).select_from(audit_log))  # what it sees is of now
        if adding[0] and not met:
            met.append(others.append(Event.REFUSED, what="meanwhile"))

    place = rows.log_place(fence)
    assert isinstance(place, LogRows)
    append = place.rows.append

    def appends(*given: Any, **named: Any) -> None:
        adding[0] = True
        append(*given, **named)

    log = AuditLog(place, writer=WRITER, key=KEY, clock=rows.clock)
    log.append(Event.REFUSED, what="before")
    with patch.object(place.rows, "append", appends):
        log.append(Event.REFUSED, what="after")
    assert [entry.text("what") for entry in rows.read().of(Event.REFUSED)] == ["before", "meanwhile", "after"]
    assert len(met) == 1


@pytest.mark.parametrize("saved", [True, False])
def test_an_answer_that_is_lost_leaves_a_whole_log(rows: Place, monkeypatch: pytest.MonkeyPatch, saved: bool) -> None:
    """The entry is there or not: what it tells of has not begun. A release is entered once all the same."""
    assert rows.database is not None
    dialect, lost = rows.database.engine.dialect, [0]
    commit = dialect.do_commit

    def cut(connection: Any) -> None:
        if lost[0]:
            lost[0] -= 1
            if saved:
                commit(connection)
            raise dialect.dbapi.OperationalError("server closed the connection")  # type: ignore[union-attr]
        commit(connection)

    monkeypatch.setattr(dialect, "do_commit", cut)
    log = rows.log()
    log.append(Event.STARTED)
    releases = rows.releases()
    lost[0] = 1
    with pytest.raises(StorageError, match="cannot be read or written"):
        log.append(Event.REFUSED)
    log.append(Event.STOPPED)
    assert [entry.event for entry in rows.read().entries].count(Event.REFUSED) == int(saved)

    def cut_the_append(entries: Any) -> None:
        lost[0] = 1
        append(entries)

    append = releases.kept.append
    monkeypatch.setattr(releases.kept, "append", cut_the_append)
    with pytest.raises(StorageError, match="cannot be read or written"):
        releases.enter(round_key(PLAN), b"sum 1", PRIVATE)
    monkeypatch.setattr(releases.kept, "append", append)
    assert len(releases.kept.entries()) == int(saved)
    releases.enter(round_key(PLAN), b"sum 1", PRIVATE)
    assert len(releases.kept.entries()) == 1


def test_a_release_that_others_entered_meanwhile_is_looked_at_anew(rows: Place) -> None:
    one, other = rows.releases(), rows.kept()
    stale = other.entries()
    one.enter(round_key(PLAN), b"sum 1", PRIVATE)
    entry = one.kept.entries()[0]
    with pytest.raises(StorageError, match="nothing is released before the ledger was read again"):
        other.append([entry])
    assert stale == ()
    assert len(other.entries()) == 1


LIVED = st.lists(
    st.tuples(
        st.sampled_from(
            ["leads", "appends", "seals", "releases", "starts again", "is killed in between", "loses an answer",
             "saved, and loses the answer", "later"]
        ),
        st.sampled_from([0, 1]),
        st.integers(1, 4),
    ),
    max_size=24,
)  # fmt: skip


class Life:
    """Two coordinators, what the one that leads has been told that it did, and what only may be there."""

    def __init__(self, database: PostgresqlDatabase, place: DatabasePlace, folder: Path) -> None:
        self.both = [Candidate(database, place, folder / name) for name in ("first", "second")]
        first = self.both[0].place
        self.logs = [one.place.log() for one in self.both]
        self.database, self.leads = database, 0
        self.both[0].lead()
        first.releases().noise_key(b"")
        self.told: list[Head] = []
        self.released: set[bytes] = set()

    def does(self, what: str, who: int, number: int) -> None:
        one, log = self.both[who], self.logs[who]
        if what == "leads":
            if one.leadership.term and self.leads == who:
                return
            by_its_owner(
                self.database, text("SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory'")
            )
            one.lead()
            self.leads, self.logs[who] = who, one.place.log()
        elif what == "starts again":
            self.logs[who] = one.place.log()
        elif what == "later":
            one.place.clock.now += 40
        elif what == "loses an answer" or what == "saved, and loses the answer":
            with lost_answer(self.database, saved=what != "loses an answer"), suppress(StorageError, Overtaken):
                log.append(Event.REFUSED, round=number)
        else:
            self._as_leader(what, who, number)

    def _as_leader(self, what: str, who: int, number: int) -> None:
        one, log = self.both[who], self.logs[who]
        subject = b"sum %d" % number
        works: dict[str, Any] = {
            "appends": lambda: self.told.append(log.append(Event.REFUSED, round=number)),
            "seals": lambda: log.append(Event.SEALED),
            "releases": lambda: one.place.releases(log).enter(round_key(PLAN, number), subject, PRIVATE),
            "is killed in between": lambda: released(log)(next_release(one.place, number)),
        }
        if who == self.leads:
            works[what]()
            if what == "releases":
                self.released.add(subject)
        else:
            before = len(_rows(self.database))
            with suppress(Overtaken) if what == "seals" else pytest.raises(Overtaken):  # there may be nothing to seal
                works[what]()
            assert len(_rows(self.database)) == before

    def check(self) -> None:
        place = self.both[self.leads].place
        reading = place.read()
        assert reading.walk.check_known([Known(head=head, by="who was told") for head in self.told], "") == len(
            self.told
        )
        entries = place.kept().entries()
        assert {entry.subject for entry in entries} == {digest_of(subject) for subject in self.released}
        assert len(entries) == len(self.released), "each counts once"
        take_up(place.log(), place.releases())


def next_release(place: Place, number: int) -> Any:
    return next_entry(
        place.kept().entries(), round_key(PLAN, number), "delta", PRIVATE.releases_of_round(weighted=False)[0][1], at=1
    )


@contextmanager
def lost_answer(database: PostgresqlDatabase, *, saved: bool) -> Iterator[None]:
    dialect = database.engine.dialect
    commit = dialect.do_commit

    def cut(connection: Any) -> None:
        if saved:
            commit(connection)
        raise dialect.dbapi.OperationalError("server closed the connection")  # type: ignore[union-attr]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dialect, "do_commit", cut)
        yield


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LIVED)
def test_whatever_two_coordinators_live_through_there_is_one_log_and_each_release_counts_once(
    server: PostgresqlServer, database: PostgresqlDatabase, tmp_path: Path, lived: list[tuple[str, int, int]]
) -> None:
    by_its_owner(database, *(delete(table) for table in ADDED_TO))
    shutil.rmtree(tmp_path)
    tmp_path.mkdir(mode=0o700)
    place = DatabasePlace.parse(f"postgresql+psycopg://{SUPERUSER}@/postgres?host={server.folder}", tmp_path)
    life = Life(database, place, tmp_path)
    try:
        for what in lived:
            life.does(*what)
        life.logs[life.leads].append(Event.STOPPED)
        life.check()
    finally:
        for one in life.both:
            one.leadership.release()


# --- what the folder had before


def test_a_log_and_a_ledger_of_the_folder_are_taken_over_once(rows: Place) -> None:
    before = Place(rows.folder, None)
    log = before.log()
    log.append(Event.STARTED)
    log.append(Event.STOPPED)
    log.seal()
    before.releases().noise_key(b"")
    before.releases().enter(round_key(PLAN), b"sum 1", PRIVATE)
    before.releases().close([OTHER_PLAN])
    with pytest.raises(StateError, match=r"audit_log is empty, and .*/audit has a log, which goes on there"):
        rows.log().append(Event.STARTED)
    lines = [line.content for line in before.log_place().lines()]
    for _ in range(2):
        take_up(rows.log(), rows.releases())
        assert [line.content for line in rows.log_place().lines()][:3] == lines
        rows.log().append(Event.STARTED)
    assert rows.kept().entries() == before.kept().entries()
    assert rows.kept().closed() == {OTHER_PLAN}
    assert rows.releases().noise_key(b"sum 1") == before.releases().noise_key(b"sum 1")
    assert [line.content for line in before.log_place().lines()] == lines, "it stays as it was"


def test_rows_that_were_emptied_are_not_filled_anew_from_the_folder(rows: Place) -> None:
    assert rows.database is not None
    before = Place(rows.folder, None)
    before.log().append(Event.STARTED)
    before.releases().noise_key(b"")
    before.releases().enter(round_key(PLAN), b"sum 1", PRIVATE)
    take_up(rows.log(), rows.releases())
    rows.releases(rows.log()).enter(round_key(PLAN, 2), b"sum 2", PRIVATE)
    by_its_owner(rows.database, delete(audit_log), delete(release_ledger))
    with pytest.raises(IntegrityError, match=r"audit_log has no entry 4, which .*/newest has"):
        take_up(rows.log(), rows.releases())
    assert _rows(rows.database) == []
    (rows.folder / "audit" / "newest").unlink()
    with pytest.raises(IntegrityError, match=r"release_ledger has no entry 2, which .*/newest has"):
        take_up(rows.log(), rows.releases())
    assert _rows(rows.database) == []


def test_a_log_or_a_ledger_of_another_time_is_refused_by_name(rows: Place) -> None:
    log = rows.log()
    log.append(Event.STARTED)
    log.seal()
    rows.releases().enter(round_key(PLAN), b"sum 1", PRIVATE)
    other = Place(rows.folder, None)
    other.log().append(Event.STARTED)
    with pytest.raises(IntegrityError, match=r"the audit log in .*/audit ends with entry 1, and .* does not go on"):
        take_up(rows.log(), rows.releases())
    for path in (rows.folder / "audit").glob("log.*"):
        path.unlink()
    other.releases().enter(round_key(PLAN), b"sum 2", PRIVATE)
    with pytest.raises(IntegrityError, match=r"the ledger of releases in .*/ledger ends with entry 1"):
        take_up(rows.log(), rows.releases())


# --- processes


@pytest.mark.slow
def test_another_process_with_a_folder_of_its_own_goes_on_with_the_log(
    server: PostgresqlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, and followed; commands read and add where either is."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("LORICA_CA_PASSPHRASE", "a passphrase of many words")
    server.execute("CREATE DATABASE two_folders")
    folders = [tmp_path / name for name in ("first", "second")]
    names = ("--silos-port", "--enrolment-port", "--metrics-port", "--status-port")
    ports = [word for name, port in zip(names, free_ports(4), strict=True) for word in (name, str(port))]
    made = run_command(cli.main, "init", folders[0], "--no-plan", "--host", "localhost", *ports)
    assert made.code == 0, made.err
    file = folders[0] / "federation.toml"
    url = f"postgresql+psycopg://{SUPERUSER}@/two_folders?host={server.folder}"
    file.write_text(file.read_text().replace('database = ""', f'database = "{url}"'))
    shutil.copytree(folders[0], folders[1], ignore=lambda *_: ["audit", "state", "coordinator.lock"])
    processes = []
    try:
        for number, folder in enumerate(folders):
            serving = coordinator(folder, "serve")
            processes.append(serving)
            until(serving, "serving")
            asked = run_command(cli.main, "ca", "export", tmp_path / f"ca-{number}", "--dir", folder)
            assert asked.code == 0, asked.err
            serving.kill()
            serving.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait(60)
            assert process.stderr is not None
            process.stderr.close()
    verified = [run_command(cli.main, "audit", "verify", "--json", "--dir", folder) for folder in folders]
    assert [done.code for done in verified] == [0, 0], verified[0].err + verified[1].err
    assert json.loads(verified[0].out)["entries"] == json.loads(verified[1].out)["entries"]
    shown = run_command(cli.main, "audit", "show", "--json", "--dir", folders[0]).out.splitlines()
    events = [json.loads(line)["event"] for line in shown]
    assert events.count("started") == 2
    assert [json.loads(line)["details"]["file"] for line in shown if "ca export" in line] == [
        str(tmp_path / "ca-0"), str(tmp_path / "ca-1"),
    ]  # fmt: skip
