"""Whether two runs of one plan came to the same: models bit by bit, and what the records say of every round.

Where masks and the rounding under them are drawn anew in each run, training goes its own way from the first bit that
differs: all is compared then but numbers. tests/crash makes the draws repeatable, and compares the bits of masked runs,
too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lorica_coordinator.service.records import RoundRow, SiloRow
from silo_wire.canonical import Digest

NO_MODEL = Digest("")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of a finished plan: its last model, and all attempts at its rounds, oldest first."""

    plan: Digest
    model: Digest
    rounds: tuple[RoundRow, ...]


def differences(expected: Result, actual: Result, *, drawn_anew: bool = False) -> Sequence[str]:
    """One line for each thing that is not the same but for the time it took; none when nothing is.

    `drawn_anew`: the runs are masked, each with draws of its own.
    """
    comparable = _without_numbers if drawn_anew else timeless
    found: list[str] = []
    if actual.plan != expected.plan:
        return [f"plan {actual.plan}, expected {expected.plan}: the two runs cannot be compared"]
    if actual.model != expected.model and not drawn_anew:
        found.append(f"final model {actual.model}, expected {expected.model}")
    wanted = {(row.round, row.attempt): comparable(row) for row in expected.rounds}
    got = {(row.round, row.attempt): comparable(row) for row in actual.rounds}
    for round_number, attempt in sorted({*wanted, *got}):
        want, have = wanted.get((round_number, attempt)), got.get((round_number, attempt))
        if want != have:
            found.append(f"round {round_number} attempt {attempt} is {have}, expected {want}")
    return found


def _without_numbers(row: RoundRow) -> RoundRow:
    """Of a masked or noised round: how it ended, who was in its sum, of how many coordinates. Noise may make all
    weights zero."""
    silos = tuple(SiloRow(silo=silo.silo, outcome=silo.outcome, detail=silo.detail) for silo in row.silos)
    masked = row.masked and replace(row.masked, weight_sum=0.0, saturated=0)
    return replace(
        timeless(row),
        model=NO_MODEL,
        masked=masked,
        silos=silos,
        weight_fallback=False,
        macro_exact_match=None,
        micro_exact_match=None,
    )


def timeless(row: RoundRow) -> RoundRow:
    """The row without instants and durations."""
    silos = tuple(
        replace(silo, evaluation=silo.evaluation and replace(silo.evaluation, seconds=0.0)) for silo in row.silos
    )
    return replace(row, opened_unix_s=0.0, closed_unix_s=None, silos=silos)
