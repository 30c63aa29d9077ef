"""kill -9 of the coordinator while silos with and without labels take turns: whoever's turn it was goes on, with the
bits of the run that nobody disturbs."""

import pytest

from lorica.soak.comparison import differences
from lorica_coordinator.rounds.states import Collecting, Gathering
from tests.support.json_logs import logged
from tests.support.kill_run import Kill, KillRun
from tests.support.turns_kill_plan import COORDINATOR, KILLS, LABELLED, ROUNDS, WARDS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def of_kind(number: int) -> tuple[str, ...]:
    return LABELLED if number % 2 else WARDS


def test_every_round_is_of_its_kind_and_has_the_bits_of_the_undisturbed_run(
    turns_run: KillRun, turns_undisturbed: KillRun
) -> None:
    assert [turns_run.death(kill).kill for kill in KILLS] == list(KILLS)
    assert differences(turns_undisturbed.result, turns_run.result) == []
    rows = turns_run.result.rounds
    assert [(row.round, row.attempt, row.outcome) for row in rows] == [
        (number, 1, "applied") for number in range(1, ROUNDS + 1)
    ]
    assert [tuple(silo.silo for silo in row.silos if silo.outcome == "committed") for row in rows] == [
        of_kind(row.round) for row in rows
    ]
    scored = {row.round: [silo.silo for silo in row.silos if silo.evaluation is not None] for row in rows}
    assert scored == {1: [], 2: list(LABELLED), 3: [], 4: list(LABELLED)}
    assert len({row.model for row in rows}) == ROUNDS, "either kind moved it"


def test_the_dead_coordinator_had_the_turn_on_disk(turns_run: KillRun) -> None:
    """Between the rounds of the two kinds, and with one of two updates of a round of silos without labels."""

    def state(point: str, number: int) -> object:
        death = turns_run.death(Kill(process=COORDINATOR, point=point, round=number))
        assert death.coordinator is not None
        return death.coordinator.state

    for between in (state("round-closed", 1), state("evaluation-closed", 2)):
        assert isinstance(between, Gathering | Collecting)
    within = state("update-accepted", 2)
    assert isinstance(within, Collecting)
    assert (within.round, within.cohort, len(within.updates)) == (2, WARDS, 1)


def test_no_finished_update_is_trained_again(turns_run: KillRun) -> None:
    for silo in turns_run.federation.shape.silos:
        trained = [record["round"] for record in logged(turns_run.federation.log(silo), "trained")]
        assert trained == [number for number in range(1, ROUNDS + 1) if silo in of_kind(number)], silo
