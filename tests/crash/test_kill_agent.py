"""kill -9 of a silo's agent at named points, one test each: after the same command is given again, nothing is
different.

All kills happen in one run of a plan, each in a round of its own where it needs one; see tests/support/kill_plan.py.
"""

from collections.abc import Callable, Mapping

import pytest

from lorica.soak.comparison import differences
from tests.support.audit_logs import check_audit_logs
from tests.support.kill_plan import AGENT_KILLS
from tests.support.kill_run import AgentRecords, Death, Kill, KillRun, check_the_round, check_work_was_done_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def _records(death: Death) -> AgentRecords:
    assert death.agent is not None
    return death.agent


def _nothing_saved(death: Death) -> None:
    """No update of this round is journalled."""
    update = _records(death).update
    assert update is None or update.key.round < death.at()


def _saved(death: Death) -> None:
    update = _records(death).update
    assert update is not None
    assert update.key.round == death.at()
    assert (death.at(), "training", "uploaded") not in _outcomes(death)


def _outcomes(death: Death) -> set[tuple[int, str, str]]:
    return {(one.round, one.work, one.outcome) for one in _records(death).outcomes}


def _part(death: Death) -> None:
    _nothing_saved(death)
    assert any(name.endswith(".part") and size for name, size in death.files.items())


def _checkpoint(death: Death) -> None:
    _nothing_saved(death)
    assert any(name.endswith(".checkpoint") for name in death.files)


def _written(death: Death) -> None:
    _nothing_saved(death)
    assert any(f"round-{death.at()}-" in name and name.endswith(".delta") for name in death.files)


def _residual(name_ends: str) -> Callable[[Death], None]:
    def check(death: Death) -> None:
        _written(death)
        assert any(name.endswith(name_ends) for name in death.files)

    return check


def _has_outcome(work: str, outcome: str, *, expected: bool) -> Callable[[Death], None]:
    def check(death: Death) -> None:
        assert ((death.at(), work, outcome) in _outcomes(death)) == expected

    return check


WHERE_IT_DIED: Mapping[str, Callable[[Death], None]] = {
    "plan-journalled": lambda death: None,
    "mid-download": _part,
    "model-not-named": _part,
    "model-journalled": _nothing_saved,
    "mid-training": _nothing_saved,
    "epoch-done": _nothing_saved,
    "checkpoint-written": _checkpoint,
    "residual-not-named": _residual("new.residual.part"),
    "residual-named": _residual(".residual"),
    "update-written": _written,
    "update-journalled": _saved,
    "mid-upload": _saved,
    "last-chunk-sent": _saved,
    "receipt-not-journalled": _saved,
    "outcome-journalled": _has_outcome("evaluation", "evaluated", expected=True),
    "mid-evaluation": _has_outcome("evaluation", "evaluated", expected=False),
    "score-not-reported": _has_outcome("evaluation", "evaluated", expected=False),
    "score-not-journalled": _has_outcome("evaluation", "evaluated", expected=False),
}


@pytest.mark.parametrize("kill", AGENT_KILLS, ids=lambda kill: kill.point)
def test_a_silo_agent_is_killed(kill: Kill, agent_run: KillRun, undisturbed: KillRun) -> None:
    death = agent_run.death(kill)
    WHERE_IT_DIED[kill.point](death)
    check_the_round(kill.round, agent_run, undisturbed)


def test_all_rounds_are_those_of_the_undisturbed_run(agent_run: KillRun, undisturbed: KillRun) -> None:
    assert differences(undisturbed.result, agent_run.result) == []
    assert len(agent_run.deaths) == len(AGENT_KILLS)


def test_no_finished_update_is_trained_again(agent_run: KillRun) -> None:
    check_work_was_done_once(agent_run)


def test_the_audit_logs_are_whole_and_agree(agent_run: KillRun) -> None:
    """Whatever was killed when: nothing left, and nothing counts, that they do not tell of."""
    federation = agent_run.federation
    check_audit_logs(federation.folder, [federation.agent(silo) for silo in federation.shape.silos])
