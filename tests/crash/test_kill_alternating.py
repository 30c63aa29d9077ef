"""kill -9 of the coordinator and of agents while halves of adapters take turns: the round's half, and what waits of the
other one, are those of the run that nobody disturbs."""

import pytest

from lorica.soak.comparison import differences
from tests.support.alternating_kill_plan import KILLS, ROUNDS
from tests.support.kill_run import KillRun, check_the_round, check_work_was_done_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def test_every_round_has_the_bits_of_the_undisturbed_run(
    alternating_run: KillRun, alternating_undisturbed: KillRun
) -> None:
    assert [alternating_run.death(kill).kill for kill in KILLS] == list(KILLS)
    for number in range(1, ROUNDS + 1):
        check_the_round(number, alternating_run, alternating_undisturbed)
    assert differences(alternating_undisturbed.result, alternating_run.result) == []
    models = [row.model for row in alternating_run.result.rounds]
    assert len(set(models)) == len(models) == ROUNDS, "either half moved it"


def test_no_finished_update_is_trained_again(alternating_run: KillRun) -> None:
    check_work_was_done_once(alternating_run)
