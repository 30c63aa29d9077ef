"""One undisturbed run of a plan and its runs under kills, at the same time: each of them waits more than it works."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from ops.soak.federation import MortalFederation
from tests.support.kill_plan import AGENT_KILLS, COORDINATOR_KILLS, SHAPE
from tests.support.kill_run import Executioner, KillRun, processes_in

KILLS = {"undisturbed": (), "coordinator_run": COORDINATOR_KILLS, "agent_run": AGENT_KILLS}


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[KillRun]]]:
    """Those runs that tests of this session ask for, by the names of their fixtures."""
    root = tmp_path_factory.mktemp("crash")
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    with ExitStack() as stack:
        first: MortalFederation | None = None
        executioners: dict[str, Executioner] = {}
        for name, kills in KILLS.items():
            if name not in asked:
                continue
            processes = stack.enter_context(processes_in(root / name))
            if first is None:
                federation = first = MortalFederation(root / name, SHAPE, processes)
                federation.set_up()
            else:
                federation = first.copy(root / name, processes)
            executioners[name] = Executioner(federation, kills)
        pool = stack.enter_context(ThreadPoolExecutor(max(1, len(executioners))))
        futures = {name: pool.submit(executioner.run) for name, executioner in executioners.items()}
        for executioner in executioners.values():
            stack.callback(executioner.give_up)
        yield futures


def _run(name: str) -> Callable[[Mapping[str, Future[KillRun]]], KillRun]:
    @pytest.fixture(scope="session", name=name)
    def run(runs: Mapping[str, Future[KillRun]]) -> KillRun:
        return runs[name].result()

    return run


undisturbed = _run("undisturbed")
coordinator_run = _run("coordinator_run")
agent_run = _run("agent_run")
