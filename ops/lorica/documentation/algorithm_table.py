"""The tables of algorithms and of the ledger's mechanisms, made of what each says of itself."""

from typing import cast, get_args

from lorica.documentation.markdown import markdown_table
from lorica_security.privacy.mechanisms.named import MECHANISMS
from silo_wire.algorithm import Algorithm, Number, Promise
from silo_wire.drift_correction import DRIFT_CORRECTIONS
from silo_wire.server_step.step_length import STEP_LENGTHS
from silo_wire.weightings.named import WEIGHTINGS


def algorithm_table() -> str:
    # Here, not above: torch, which reducers bring, takes seconds to import.
    from lorica_coordinator.edges.sums.reducers.chosen import REDUCERS

    header = ("algorithm", "what it is", "needs of a silo", "under masks", "with privacy", "passes over the deltas")
    weightings = [_row(f'weighting `"{it.name}"`', it) for it in WEIGHTINGS]
    # The classes, not what they make: what an algorithm says of itself is the same for every plan.
    reducers = [_row(f"reducer {it.name}", cast(Algorithm, it)) for it in REDUCERS]
    step_lengths = [_row(f'step length `"{it.name}"`', it) for it in STEP_LENGTHS]
    corrections = [_row(f'drift correction `"{it.name}"`', it) for it in DRIFT_CORRECTIONS]
    return markdown_table(header, [*weightings, *reducers, *step_lengths, *corrections])


def mechanism_table() -> str:
    header = ("entry of the ledger", "what was released", "a budget of which unit counts it", "who makes the noise")
    rows = [
        (
            f"`{it.name}`",
            it.meaning,
            "of any" if it.of_any_unit else "of the unit in the entry",
            "several silos together" if it.joint else "one party",
        )
        for it in MECHANISMS
    ]
    return markdown_table(header, rows)


def _row(name: str, it: Algorithm) -> tuple[str, ...]:
    promises = [promise for promise in get_args(Promise) if promise in it.promises]
    needs = [number for number in Number if number in it.needs]
    return (name, it.meaning, ", ".join(needs), it.masks or "no", ", ".join(promises) or "none", str(it.passes))
