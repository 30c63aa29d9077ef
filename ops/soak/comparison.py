"""Whether two runs of one plan came to the same: models bit by bit, and what the records say of every round."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.service.records import RoundRow
from silo_wire.canonical import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of a finished plan: its last model, and all attempts at its rounds, oldest first."""

    plan: Digest
    model: Digest
    rounds: tuple[RoundRow, ...]


def differences(expected: Result, actual: Result) -> Sequence[str]:
    """One line for each thing that is not the same but for the time it took; none when nothing is."""
    found: list[str] = []
    if actual.plan != expected.plan:
        return [f"plan {actual.plan}, expected {expected.plan}: the two runs cannot be compared"]
    if actual.model != expected.model:
        found.append(f"final model {actual.model}, expected {expected.model}")
    wanted = {(row.round, row.attempt): timeless(row) for row in expected.rounds}
    got = {(row.round, row.attempt): timeless(row) for row in actual.rounds}
    for round_number, attempt in sorted({*wanted, *got}):
        want, have = wanted.get((round_number, attempt)), got.get((round_number, attempt))
        if want != have:
            found.append(f"round {round_number} attempt {attempt} is {have}, expected {want}")
    return found


def timeless(row: RoundRow) -> RoundRow:
    """The row without instants and durations."""
    silos = tuple(
        replace(silo, evaluation=silo.evaluation and replace(silo.evaluation, seconds=0.0)) for silo in row.silos
    )
    return replace(row, opened_unix_s=0.0, closed_unix_s=None, silos=silos)
