"""What the coordinator writes to its disk for the journal of one masked attempt: a real store, the protocol's own
machines, and silos in memory.

Vectors are tiny, since nothing of them is in the journal: what silos tell each other grows with the square of their
number.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lorica.secure_aggregation.in_memory import FEDERATION, PLAN, AttemptInMemory, terms_of
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.rounds.secure_attempt import SecureAttempt, opened
from lorica_coordinator.rounds.states import Course, Masking
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_security.errors import StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.events import OpenAttempt
from silo_wire.canonical import Digest, digest_of

_DEADLINE_S = 600.0
_TERMS = PlanTerms(
    federation=FEDERATION,
    plan=Digest(PLAN),
    name="memory",
    rounds=1,
    min_silos=3,
    start_when_ready=True,
    gathering_deadline_s=_DEADLINE_S,
    training_deadline_s=_DEADLINE_S,
    evaluation_deadline_s=_DEADLINE_S,
    evaluate_every=0,
    evaluate_initial=False,
    evaluate_last=False,
    secure_aggregation=True,
    masking_deadline_s=_DEADLINE_S,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalFigures:
    """Bytes: of the events themselves, given to the disk by the end of the attempt, and to erase it. `cpu_s`: of a
    transition, in seconds."""

    silos: int
    events: int
    event_bytes: int
    written_bytes: int
    erased_bytes: int
    cpu_s: float


def measure_journal(folder: Path, silos: int) -> JournalFigures:
    """In the empty `folder`. Nothing else may write in this process meanwhile."""
    names = [SiloName(f"silo-{number:02}") for number in range(1, silos + 1)]
    course = Course(terms=_TERMS, population=frozenset(names), ready=frozenset(names), model=Digest(PLAN))
    masking = Masking(course=course, round=1, attempt=1, silos=tuple(names), deadline=_DEADLINE_S)
    states = [replace(masking, secure=secure) for secure in _attempts(names)]
    journal = states[-1].secure.journal if states[-1].secure else ()
    store = SqlRoundStore(folder / "state.sqlite", FEDERATION)
    try:
        store.transition(masking, [], at=0.0, now=0.0)
        begun, before = time.process_time(), _written()
        for number, state in enumerate(states):
            store.transition(state, [], at=0.0, now=number / len(states))
        cpu_s, written = time.process_time() - begun, _written()
        store.transition(masking, [], at=0.0, now=0.0)
        erased = _written()
    finally:
        store.close()
    return JournalFigures(
        silos=silos,
        events=len(journal),
        event_bytes=sum(map(len, journal)),
        written_bytes=written - before,
        erased_bytes=erased - written,
        cpu_s=cpu_s / len(states),
    )


def _attempts(names: Sequence[SiloName]) -> Iterator[SecureAttempt]:
    """One that has all silos' vectors, after each of its events."""
    whole = AttemptInMemory(names, terms_of(names, elements=8, largest=1.0, largest_weight=1.0))
    first, *events = whole.journal({name: bytes.fromhex(digest_of(name.encode())) for name in names})
    assert isinstance(first, OpenAttempt), "an attempt begins with its opening"
    attempt, _ = opened(first, tuple(whole.identities.items()), {})
    yield attempt
    for event in events:
        attempt, _ = attempt.stepped(event)
        yield attempt


def _written() -> int:
    """Bytes that this process has given to `write` and its kind."""
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, count = line.partition(": ")
        if name == "wchar":
            return int(count)
    raise StateError("/proc/self/io of this machine does not count what is written")
