"""One undisturbed run of a plan, its runs under kills and the story of full disks, all at the same time.

They wait as much as they work: for processes to start, and for silos to come back to a coordinator.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from ops.soak.federation import MortalFederation
from tests.support.fault_story import Told, story_in
from tests.support.kill_plan import AGENT_KILLS, COORDINATOR_KILLS, SHAPE
from tests.support.kill_run import Executioner, KillRun, processes_in

KILLS = {"undisturbed": (), "coordinator_run": COORDINATOR_KILLS, "agent_run": AGENT_KILLS}


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Any]]]:
    """Those that tests of this session ask for, by the names of their fixtures."""
    root = tmp_path_factory.mktemp("crash")
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    begin: dict[str, Callable[[], object]] = {}
    with ThreadPoolExecutor(len(KILLS) + 1) as pool, ExitStack() as stack:
        first: MortalFederation | None = None
        for name, kills in KILLS.items():
            if name not in asked:
                continue
            processes = stack.enter_context(processes_in(root / name))
            if first is None:
                federation = first = MortalFederation(root / name, SHAPE, processes)
                federation.set_up()
            else:
                federation = first.copy(root / name, processes)
            executioner = Executioner(federation, kills)
            begin[name] = executioner.run
            stack.callback(executioner.give_up)
        if "told" in asked and os.geteuid() == 0:
            story = stack.enter_context(story_in(root / "faults"))
            begin["told"] = story.tell
            stack.callback(story.give_up)
        yield {name: pool.submit(run) for name, run in begin.items()}


@pytest.fixture(scope="session")
def undisturbed(runs: Mapping[str, Future[KillRun]]) -> KillRun:
    return runs["undisturbed"].result()


@pytest.fixture(scope="session")
def coordinator_run(runs: Mapping[str, Future[KillRun]]) -> KillRun:
    return runs["coordinator_run"].result()


@pytest.fixture(scope="session")
def agent_run(runs: Mapping[str, Future[KillRun]]) -> KillRun:
    return runs["agent_run"].result()


@pytest.fixture(scope="session")
def told(runs: Mapping[str, Future[Told]]) -> Told:
    return runs["told"].result()
