"""kill -9 of the coordinator at named points, one test each: after the same command is given again, nothing is
different.

All kills happen in one run of a plan, each in a round of its own where it needs one; see tests/support/kill_plan.py.
"""

from collections.abc import Callable, Mapping

import pytest

from lorica.soak.comparison import differences
from lorica_coordinator.rounds.states import Aggregating, Collecting, Evaluating, Finished, Gathering, State
from tests.support.audit_logs import check_audit_logs
from tests.support.kill_plan import COORDINATOR_KILLS
from tests.support.kill_run import Death, Kill, KillRun, check_the_round, check_work_was_done_once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def _state(death: Death) -> State:
    assert death.coordinator is not None
    return death.coordinator.state


def _phase(kind: type[State]) -> Callable[[Death], None]:
    def check(death: Death) -> None:
        assert isinstance(_state(death), kind), _state(death)

    return check


def _updates(kind: type[Collecting | Aggregating], count: int) -> Callable[[Death], None]:
    def check(death: Death) -> None:
        state = _state(death)
        assert isinstance(state, kind), state
        assert len(state.updates) == count

    return check


def _reports(count: int) -> Callable[[Death], None]:
    def check(death: Death) -> None:
        state = _state(death)
        assert isinstance(state, Evaluating), state
        assert len(state.reports) == count

    return check


def _ready(count: int) -> Callable[[Death], None]:
    def check(death: Death) -> None:
        state = _state(death)
        assert isinstance(state, Gathering), state
        assert len(state.course.ready) == count

    return check


def _models(death: Death, suffix: str) -> list[str]:
    return [name for name in death.files if name.startswith("models/") and name.endswith(suffix)]


def _new_model(*, named: bool) -> Callable[[Death], None]:
    """While the round still waits for it: the model's bytes are there, with its name or without."""

    def check(death: Death) -> None:
        _updates(Aggregating, 2)(death)
        work = [name for name in death.files if "/.new-" in name and name.endswith("/model.safetensors")]
        assert bool(work) != named
        assert len(_models(death, ".safetensors")) - len(work) >= (2 if named else 1)

    return check


def _mid_publication(death: Death) -> None:
    _new_model(named=False)(death)
    assert len(_models(death, ".manifest.json")) > len([m for m in _models(death, ".safetensors") if "/.new-" not in m])


def _clearing_models(death: Death) -> None:
    _phase(Collecting | Gathering)(death)  # type: ignore[arg-type]
    assert len(_models(death, ".safetensors")) < len(_models(death, ".manifest.json"))


def _some_spooled(death: Death) -> None:
    _updates(Collecting, 0)(death)
    assert any(name.startswith("spools/") and size for name, size in death.files.items())


WHERE_IT_DIED: Mapping[str, Callable[[Death], None]] = {
    "plan-begun": _ready(0),
    "silo-ready": _ready(1),
    "evaluation-opened": _reports(0),
    "round-opened": _updates(Collecting, 0),
    "mid-download": _updates(Collecting, 0),
    "mid-upload": _some_spooled,
    "evaluation-accepted": _reports(1),
    "spool-durable": _some_spooled,
    "update-accepted": _updates(Collecting, 1),
    "update-not-acknowledged": lambda death: None,
    "evaluation-closed": _phase(Collecting),
    "aggregating-entered": _updates(Aggregating, 2),
    "resumed": _updates(Aggregating, 2),
    "mid-aggregation": _new_model(named=False),
    "model-written": _new_model(named=False),
    "mid-publication": _mid_publication,
    "model-published": _new_model(named=True),
    "round-closed": _phase(Collecting),
    "spools-not-cleared": lambda death: None,
    "clearing-spools": lambda death: None,
    "clearing-models": _clearing_models,
    "plan-finished": _phase(Finished),
}


@pytest.mark.parametrize("kill", COORDINATOR_KILLS, ids=lambda kill: kill.point)
def test_the_coordinator_is_killed(kill: Kill, coordinator_run: KillRun, undisturbed: KillRun) -> None:
    death = coordinator_run.death(kill)
    WHERE_IT_DIED[kill.point](death)
    check_the_round(kill.round, coordinator_run, undisturbed)


def test_all_rounds_are_those_of_the_undisturbed_run(coordinator_run: KillRun, undisturbed: KillRun) -> None:
    assert differences(undisturbed.result, coordinator_run.result) == []
    assert len(coordinator_run.deaths) == len(COORDINATOR_KILLS)


def test_no_finished_update_is_trained_again(coordinator_run: KillRun) -> None:
    check_work_was_done_once(coordinator_run)


def test_the_audit_logs_are_whole_and_agree(coordinator_run: KillRun) -> None:
    """Whatever was killed when: nothing left, and nothing counts, that they do not tell of."""
    federation = coordinator_run.federation
    check_audit_logs(federation.folder, [federation.agent(silo) for silo in federation.shape.silos])
