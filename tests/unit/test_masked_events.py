"""The journal of a masked attempt on the disk: each event is written once, all come back, and all go with the attempt.

Silos choose what they send, how often, in which order and when; the process may be killed and the disk full at any
moment between two transitions.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorica.secure_aggregation.in_memory import AttemptInMemory, terms_of
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.database.state_json import journal_of, state_to_json
from lorica_coordinator.rounds.events import DeadlinePassed, Event, MaskAnswered, PlanStopped
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.secure_attempt import SecureAttempt, opened
from lorica_coordinator.rounds.states import Masking, deadline_of
from lorica_security.errors import LoricaError, StorageError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import machine as protocol_machine
from lorica_security.secure_aggregation.coordinator import states as protocol_states
from lorica_security.secure_aggregation.messages import Reveal, SharedKeys
from silo_wire.canonical import digest_of
from silo_wire.codecs.secure_journals_codec import coordinator_event_from_bytes
from silo_wire.messages import Mask
from tests.support.masked_rounds import SILOS, MaskedRounds
from tests.support.rounds import FEDERATION, MASKING, T0, declined, mask_answered, masking_opened

PAGE = 4096


def masking() -> MaskedRounds:
    rounds = MaskedRounds()
    rounds.train()
    rounds.open()
    return rounds


def saved(path: Path) -> list[tuple[int, bytes]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT position, event FROM masked_events ORDER BY position").fetchall()


def files_with(events: Iterable[bytes], path: Path, but: Iterable[bytes] = ()) -> list[str]:
    """Files beside `path` that have a piece of any of these which is in none of the others."""
    others = b"".join(but)
    cut = [event[at : at + 40] for event in events for at in (0, len(event) // 3, len(event) // 2, len(event) - 40)]
    pieces = [piece for piece in cut if piece not in others]
    return [file.name for file in sorted(path.parent.iterdir()) if any(piece in file.read_bytes() for piece in pieces)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.sqlite"


@pytest.fixture
def store(path: Path) -> Iterator[SqlRoundStore]:
    with closing(SqlRoundStore(path, FEDERATION)) as made:
        yield made


# --- each event once


def attempt_of(silos: int) -> list[SecureAttempt]:
    """After each of its events, until it is unmasked."""
    names = [SiloName(f"silo-{number:02}") for number in range(silos)]
    whole = AttemptInMemory(names, terms_of(names, elements=8, largest=1.0, largest_weight=1.0))
    first, *events = whole.journal({name: bytes.fromhex(digest_of(name.encode())) for name in names})
    attempts = [opened(first, tuple(whole.identities.items()), {})[0]]  # type: ignore[arg-type]
    for event in events:
        attempts.append(attempts[-1].stepped(event)[0])
    assert isinstance(attempts.pop().state, protocol_states.Unmasked)
    return attempts


def test_what_an_attempt_writes_is_its_events_and_a_few_pages_for_each(store: SqlRoundStore, path: Path) -> None:
    """All that is written is in the log: nothing is brought into the database while the attempt is under way."""
    attempts, log = attempt_of(16), path.with_name("state.sqlite-wal")
    before = log.stat().st_size
    for number, secure in enumerate(attempts):
        store.transition(replace(MASKING, secure=secure), [], at=T0, now=T0 + number / 7)
    events = attempts[-1].journal
    content = sum(map(len, events))
    assert content > 16 * 15 * 1088, "a ciphertext of ML-KEM-768 for each of two"
    assert log.stat().st_size - before < 1.1 * content + 4 * PAGE * len(events)
    assert saved(path) == list(enumerate(events, start=1))
    assert files_with(events, path) == ["state.sqlite-wal"]


def test_a_transition_adds_rows_and_touches_no_other(store: SqlRoundStore, path: Path) -> None:
    rounds = masking()
    store.transition(rounds.state, [], at=T0, now=T0)
    with closing(sqlite3.connect(path)) as database:
        for verb in ("UPDATE", "DELETE"):
            database.execute(
                f"CREATE TRIGGER no_{verb} BEFORE {verb} ON masked_events BEGIN SELECT RAISE(ABORT, 'written'); END"
            )
    while isinstance(rounds.state, Masking):
        for name in SILOS:
            if isinstance(rounds.state, Masking) and isinstance(rounds.order(name), Mask):
                rounds.answer(name)
                store.transition(rounds.state, [], at=T0, now=T0)
    assert saved(path) == list(enumerate(journal_of(rounds.state), start=1))


def test_after_a_transition_that_failed_the_next_one_writes_what_is_missing(store: SqlRoundStore, path: Path) -> None:
    rounds = masking()
    store.transition(rounds.state, [], at=T0, now=T0)
    rounds.answer(SILOS[0])
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON masked_events BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(StorageError, match="full"):
        store.transition(rounds.state, [], at=T0, now=T0)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TRIGGER full")
    rounds.answer(SILOS[1])
    store.transition(rounds.state, [], at=T0, now=T0)
    assert saved(path) == list(enumerate(journal_of(rounds.state), start=1))


# --- what is read back


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM masked_events WHERE position = (SELECT max(position) FROM masked_events)",
        "DELETE FROM masked_events WHERE position = 2",
        "DELETE FROM masked_events",
        "INSERT INTO masked_events SELECT max(position) + 1, event FROM masked_events",
        "UPDATE masked_events SET position = -1 WHERE position = 3",
        "UPDATE machine SET events = 0",
    ],
)
def test_a_journal_that_lacks_an_event_or_has_one_more_is_refused(
    damage: str, store: SqlRoundStore, path: Path
) -> None:
    rounds = masking()
    rounds.until("unmasking")
    store.transition(rounds.state, [], at=T0, now=T0)
    with closing(sqlite3.connect(path)) as database:
        database.execute(damage)
        database.commit()
    with pytest.raises(StorageError, match=r"state\.sqlite has \d+ events of the masked attempt .* from backup"):
        store.load(T0)


@pytest.mark.parametrize(
    "damage", ["DELETE FROM masked_events; UPDATE machine SET events = 0", "UPDATE machine SET state = :idle"]
)
def test_a_journal_without_its_attempt_and_an_attempt_without_its_journal_are_refused(
    damage: str, store: SqlRoundStore, path: Path
) -> None:
    rounds = masking()
    store.transition(rounds.state, [], at=T0, now=T0)
    assert isinstance(rounds.state, Masking)
    other = state_to_json(replace(rounds.state, secure=None), now=T0)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(damage.replace(":idle", f"'{other}'"))
    with pytest.raises(StorageError, match=r"holds the phase masking with \d+ events .* from backup"):
        store.load(T0)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("UPDATE masked_events SET event = CAST(event || x'78' AS BLOB) WHERE position = 1", "damaged or cut off"),
        (
            "UPDATE masked_events SET event = (SELECT event FROM masked_events WHERE position = 1)",
            "does not fit the phase",
        ),
    ],
)
def test_events_that_no_attempt_has_written_are_refused_when_the_state_is_read(
    damage: str, said: str, store: SqlRoundStore, path: Path
) -> None:
    rounds = masking()
    rounds.until("share keys")
    store.transition(rounds.state, [], at=T0, now=T0)
    with closing(sqlite3.connect(path)) as database:
        database.execute(damage)
        database.commit()
    with pytest.raises(StorageError, match=rf"state\.sqlite has events of a masked attempt .* from backup: .*{said}"):
        store.load(T0)


def test_a_restarted_coordinator_replays_the_journal_once(
    store: SqlRoundStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at each message that is refused: their number is the silos' to choose."""
    rounds = masking()
    rounds.answer(SILOS[0])
    sent = rounds.answers_of(SILOS[1])
    store.transition(rounds.state, [], at=T0, now=T0)
    replayed: list[int] = []
    whole = protocol_machine.restored
    monkeypatch.setattr(
        protocol_machine, "restored", lambda journal, of: (replayed.append(len(journal)), whole(journal, of))[1]
    )
    state = store.load(T0)
    (answer,) = sent
    garbled = replace(mask_answered(SILOS[1]), key=MASKING.key, answer=replace(answer, signature=bytes(64)))
    for _ in range(5):
        step(state, garbled)
    assert replayed == [len(journal_of(state))]


# --- what goes


@pytest.mark.parametrize("end", ["stopped", "another attempt"])
def test_with_the_attempt_its_events_go_from_every_file(end: str, store: SqlRoundStore, path: Path) -> None:
    """Without a record that the round was closed or abandoned, too."""
    rounds = masking()
    rounds.until("unmasking")
    rounds.answer(SILOS[0])
    events = journal_of(rounds.state)
    assert isinstance(coordinator_event_from_bytes(events[-1], FEDERATION), Reveal)
    store.transition(rounds.state, [], at=T0, now=T0)
    assert files_with(events, path) == ["state.sqlite-wal"]
    after, _ = step(rounds.state, PlanStopped(now=T0))
    if end == "another attempt":
        other = masking()
        other.until("share keys")
        after = other.state
    store.transition(after, [], at=T0, now=T0)
    assert files_with(events, path, but=journal_of(after)) == []
    assert saved(path) == list(enumerate(journal_of(after), start=1))


# --- whatever silos send, and whenever the process dies


MOVES = st.one_of(
    st.tuples(st.just("answer"), st.integers(0, 3)),
    st.tuples(st.just("all answer"), st.just(0)),
    st.tuples(st.just("again"), st.integers(0, 20)),
    st.tuples(st.sampled_from(["killed", "full", "kept twice", "deadline", "stopped", "opened"]), st.just(0)),
    st.tuples(st.sampled_from(["garbled", "declined"]), st.integers(0, 3)),
)


class Course:
    """A masked round whose coordinator is killed and whose silos send what they like."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds = masking()
        self.store = SqlRoundStore(path, FEDERATION)
        self.sent: list[Any] = []
        self.ever: set[bytes] = set()
        self.keep()

    def keep(self) -> None:
        self.store.transition(self.rounds.state, [], at=T0, now=T0)
        self.ever |= set(journal_of(self.rounds.state))

    def tell(self, *events: Event) -> None:
        for event in events:
            try:
                self.rounds.state, _ = step(self.rounds.state, event)
            except LoricaError:  # and nothing was changed
                continue
            self.keep()

    def move(self, kind: str, number: int) -> None:
        name = SILOS[number % len(SILOS)]
        match kind:
            case "answer":
                answers = self.rounds.answers_of(name) if isinstance(self.rounds.state, Masking) else []
                self.sent += answers
                self.tell(*(self.answered(answer) for answer in answers))
            case "all answer":
                for each in range(len(SILOS)):
                    self.move("answer", each)
            case "again" if self.sent:
                self.tell(self.answered(self.sent[number % len(self.sent)]))
            case "garbled" if self.sent and not isinstance(self.sent[-1], SharedKeys):
                self.tell(self.answered(replace(self.sent[-1], signature=bytes(64))))
            case "killed":
                self.reopen()
            case "full":
                self.fail()
            case "kept twice":
                self.keep()
            case "declined":
                self.tell(declined(name, self.key))
            case "deadline" if (at := deadline_of(self.rounds.state)) is not None:
                self.tell(DeadlinePassed(now=at, deadline=at))
            case "stopped":
                self.tell(PlanStopped(now=T0))
            case "opened" if isinstance(self.rounds.state, Masking) and self.rounds.state.secure is None:
                self.tell(masking_opened(self.key, silos=self.rounds.state.silos, model=self.rounds.state.course.model))

    @property
    def key(self) -> Any:
        return getattr(self.rounds.state, "key", MASKING.key)

    def answered(self, answer: Any) -> MaskAnswered:
        return replace(mask_answered(SILOS[0]), key=self.key, answer=answer)

    def reopen(self) -> None:
        self.store.close()
        self.store = SqlRoundStore(self.path, FEDERATION)
        loaded = self.store.load(T0)
        assert loaded == self.rounds.state
        self.rounds.state = loaded

    def fail(self) -> None:
        """At the last row; the next transition finds room again."""
        before, after = self.rounds.state, self.rounds.state
        if isinstance(after, Masking) and after.secure is not None:
            for answer in (answer for name in SILOS for answer in self.rounds.answers_of(name)):
                self.sent.append(answer)
                after, _ = step(after, self.answered(answer))
        if len(journal_of(after)) <= len(journal_of(before)):
            return
        with closing(sqlite3.connect(self.path)) as database:
            database.execute(
                "CREATE TRIGGER full BEFORE INSERT ON masked_events BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
            )
        with pytest.raises(StorageError, match="disk is full"):
            self.store.transition(after, [], at=T0, now=T0)
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("DROP TRIGGER full")

    def check(self) -> None:
        events = journal_of(self.rounds.state)
        assert saved(self.path) == list(enumerate(events, start=1))
        assert files_with(self.ever - set(events), self.path, events) == [], "of what is over nothing is left"


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(moves=st.lists(MOVES, min_size=10, max_size=40))
def test_what_is_on_the_disk_is_the_journal_whatever_silos_send(
    moves: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    course = Course(tmp_path_factory.mktemp("masked") / "state.sqlite")
    try:
        for kind, number in moves:
            course.move(kind, number)
            course.check()
        course.reopen()
    finally:
        course.store.close()
