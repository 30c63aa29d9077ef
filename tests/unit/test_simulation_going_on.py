"""When a simulation gives up, from rows and faults alone; tests/integration/test_simulation_ended.py has it happen."""

from dataclasses import replace

import pytest

from lorica.simulation.going_on import MOST_ATTEMPTS, PATIENCE_S, GoingOn
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import StateError
from silo_wire.canonical import Digest
from tests.support.round_rows import applied_round

ROW = applied_round(
    round=2, outcome="abandoned", detail="an update is too long", closed_unix_s=0.0, model=Digest("ab" * 32)
)
VAIN = [replace(ROW, attempt=attempt) for attempt in range(1, MOST_ATTEMPTS + 1)]
RUNNING = replace(ROW, attempt=MOST_ATTEMPTS + 1, outcome="running")


@pytest.mark.parametrize("rows", [VAIN, [*VAIN, RUNNING], [replace(ROW, round=1, outcome="applied"), *VAIN]])
def test_attempts_at_one_round_that_come_to_nothing_are_counted(rows: list[RoundRow]) -> None:
    with pytest.raises(StateError, match=f"round 2 has come to nothing {MOST_ATTEMPTS} times.*an update is too long"):
        GoingOn().require(rows, None, now=0.0)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [RUNNING],
        VAIN[:-1],
        [*VAIN[:-1], RUNNING],
        [*VAIN, replace(RUNNING, outcome="applied")],
        [replace(ROW, round=1), *VAIN[:-1]],
        [replace(ROW, round=number) for number in range(1, 9)],  # masks that came to nothing: the plan goes on itself
    ],
)
def test_fewer_attempts_or_others_than_those_are_no_end(rows: list[RoundRow]) -> None:
    GoingOn().require(rows, None, now=0.0)


def test_a_fault_is_waited_for_and_counts_anew_once_it_was_gone() -> None:
    it = GoingOn()
    for now, fault in ((0.0, "full"), (PATIENCE_S - 1, "full"), (PATIENCE_S, None), (PATIENCE_S + 1, "full")):
        it.require([], fault, now=now)
    with pytest.raises(StateError, match="cannot go on: full; once that is mended"):
        it.require([], "full", now=2 * PATIENCE_S + 1)
