"""A coordinator's folder with records of rounds that never happened: as many silos and rounds as wanted, in seconds.

The plans are real, so are the tables; what silos brought follows from their numbers alone, the same each time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Table, insert

from lorica_coordinator.edges.database.round_tables import evaluations, rounds, silos, updates
from lorica_coordinator.edges.database.sqlite_database import durable_engine
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_coordinator.rounds.effects import PlanBegun
from lorica_coordinator.rounds.states import Course, Finished, Gathering, Opening, Task
from lorica_coordinator.service.plan_desk import terms_of
from lorica_coordinator.settings import settings_text
from lorica_security.host import files
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle

FEDERATION: Final = "northern-care"
ROUND_S: Final = 330.0
"""From the opening of one round to the next."""
_MODEL: Final = Digest("5b" * 32)
_PIECE: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePlan:
    """A plan with rounds 1 to `done`; `values` are of its preset, by dotted key. `best`: where its scores lead to."""

    name: str
    done: int
    best: float = 0.7
    values: Mapping[str, object] | None = None


def make_folder(root: Path, ports: Sequence[int]) -> CoordinatorFolder:
    """A new coordinator on loopback; `ports` of silos, enrolment, metrics and the status page."""
    folder = CoordinatorFolder(root)
    files.make_private_folder(root)
    KeyStore.create(folder.keys, FEDERATION, datetime.now(UTC))  # type: ignore[arg-type]
    at = dict(zip(("silos_port", "enrolment_port", "metrics_port", "status_port"), ports, strict=True))
    text = settings_text(FEDERATION, ["127.0.0.1"], **at)  # type: ignore[arg-type]
    everywhere = "0.0.0.0"  # noqa: S104  # nosec B104  # taken out, not listened on
    files.replace(folder.settings, text.replace(everywhere, "127.0.0.1").encode())
    return folder


def silo_names(count: int) -> tuple[SiloName, ...]:
    return tuple(SiloName(f"clinic-{number:03}") for number in range(count))


def fill(folder: CoordinatorFolder, plans: Sequence[MadePlan], names: Sequence[SiloName], *, now: float) -> None:
    """Write the records of `plans`, the last of which is under way, or finished where all its rounds are done; `now` in
    Unix seconds."""
    coordinator = Coordinator.load(folder)
    coordinator.open_store().close()  # which makes the tables
    database = database_of(coordinator)
    enrol(database, names, now)
    begun = now - ROUND_S * sum(plan.done + 2 for plan in plans)
    for plan in plans:
        values = {"schedule.min_silos": min(3, len(names)), **(plan.values or {})}
        bundle = create_plan(
            coordinator.shelf.plans, name=plan.name, federation=FEDERATION, source=SizedModel("micro"), overrides=values
        )
        coordinator.shelf.compile(plan.name)  # which keeps a copy
        begin(coordinator, bundle, plan.done, names, now=begun)
        masked = bundle.plan.aggregation.secure_aggregation
        add_rounds(
            database, bundle.plan.digest, range(1, plan.done + 1), names, begun=begun, best=plan.best, masked=masked
        )
        begun += ROUND_S * (plan.done + 2)


def database_of(coordinator: Coordinator) -> Path:
    return coordinator.settings.state_folder / "state.sqlite"


def enrol(database: Path, names: Sequence[SiloName], now: float) -> None:
    """Into the tables of a store that was opened before."""
    rows = [
        {
            "silo": name,
            "identity_public_key": bytes(32),
            "certificate_serial": f"{number:x}",
            "certificate_digest": "0" * 64,
            "certificate_expires": now + 6 * 86_400.0,
            "enrolled_at": now - 30 * 86_400.0,
            "last_seen": now - 60.0 * (number % 7),
            "agent_version": "0.1.0",
            "agent_wire": "1.0",
        }
        for number, name in enumerate(names)
    ]
    _insert(database, [(silos, rows)])


def begin(coordinator: Coordinator, bundle: PlanBundle, done: int, names: Sequence[SiloName], *, now: float) -> None:
    """Make it the present plan, after `done` rounds."""
    terms = terms_of(bundle.plan)
    course = Course(terms=terms, population=frozenset(names), model=_MODEL, model_round=done)
    following = Opening(round=done + 1, attempt=1, task=Task.TRAINING)
    state = (
        Finished(course=course) if done >= terms.rounds else Gathering(course=course, opening=following, started=True)
    )
    store = coordinator.open_store()
    try:
        store.transition(state, [PlanBegun(plan=terms.plan, name=terms.name)], at=now, now=0.0)
    finally:
        store.close()


def add_rounds(
    database: Path,
    plan: Digest,
    numbers: Sequence[int],
    names: Sequence[SiloName],
    *,
    begun: float,
    best: float = 0.7,
    masked: bool = False,
) -> None:
    """Rounds of every silo, each applied and scored; of a `masked` one silos have no figures, as it is."""
    of_rounds: list[dict[str, Any]] = []
    of_updates: list[dict[str, Any]] = []
    of_scores: list[dict[str, Any]] = []
    for number in numbers:
        at = begun + ROUND_S * (number - 1) * (1 + 0.02 * math.sin(number))
        key = {"plan": plan, "round": number, "attempt": 1}
        matches = [_matches(number, index, best) for index in range(len(names))]
        mean = sum(matches) / len(matches) / _QUESTIONS
        of_rounds.append(
            {
                **key,
                "outcome": "applied",
                "opened_at": at,
                "closed_at": at + 0.9 * ROUND_S,
                "model": _MODEL,
                **(_MASKED if masked else {}),
                "macro_exact_match": None if masked else mean,
                "micro_exact_match": mean,
                "scored": None if masked else len(names),
            }
        )
        for index, name in enumerate(names):
            told = _NOTHING if masked else _told(number, index, len(names))
            of_updates.append({**key, "silo": name, "outcome": "committed", **told})
            if not masked:
                of_scores.append({**key, "silo": name, **_SCORED, "exact_matches": matches[index], "reported_at": at})
    _insert(database, [(rounds, of_rounds), (updates, of_updates), (evaluations, of_scores)])


_QUESTIONS: Final = 200
_MASKED: Final = {"weight_sum": 12.5, "saturated": 0, "coordinates": 300_000}
_NOTHING: Final = dict.fromkeys(("examples", "loss_max", "loss_min", "weight", "share", "delta_norm"), 0)
_SCORED: Final = {
    "model": _MODEL,
    "split": "dev",
    "examples": _QUESTIONS,
    "executed": 0,
    "execution_matches": 0,
    "loss_per_token": 1.0,  # nosec B105  # a loss
    "seconds": 1.0,
}


def _told(number: int, index: int, of: int) -> dict[str, float]:
    loss = 3.0 / (1 + number / 12) + 0.25 * math.sin(index + number / 7) + 0.5
    reduction = 0.1 + 0.6 / (1 + number / 8) + 0.05 * math.cos(index * 2 + number / 3)
    part = 1 + 0.4 * math.sin(index) + 0.2 * math.sin(index * 3 + number / 11)
    return {
        "examples": 400 + 37 * index,
        "loss_max": loss + reduction,
        "loss_min": loss,
        "weight": part,
        "share": part / of,
        "delta_norm": 1.0,
    }


def _matches(number: int, index: int, best: float) -> int:
    """Of _QUESTIONS."""
    part = best * (1 - math.exp(-number / 25)) + 0.06 * math.sin(index) + 0.02 * math.sin(number * 1.7 + index)
    return max(0, min(_QUESTIONS, round(_QUESTIONS * part)))


def _insert(database: Path, tables: Sequence[tuple[Table, list[dict[str, Any]]]]) -> None:
    engine = durable_engine(database)
    try:
        with engine.begin() as connection:
            for table, rows in tables:
                for start in range(0, len(rows), _PIECE):
                    connection.execute(insert(table), rows[start : start + _PIECE])
    finally:
        engine.dispose()
