"""Undisturbed runs of a plain, an alternating, a masked plan and one of silos that take turns, their runs under kills and the story of full disks, all
at the same time.

They wait as much as they work: for processes to start, and for silos to come back to a coordinator.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from lorica.soak.federation import MortalFederation, Shape
from tests.support.alternating_kill_plan import KILLS as ALTERNATING_KILLS
from tests.support.alternating_kill_plan import SHAPE as ALTERNATING_SHAPE
from tests.support.fault_story import Told, story_in
from tests.support.kill_plan import AGENT_KILLS, COORDINATOR_KILLS, SHAPE
from tests.support.kill_run import Executioner, Kill, KillRun, processes_in
from tests.support.masked_kill_plan import KILLS as MASKED_KILLS
from tests.support.masked_kill_plan import SHAPE as MASKED_SHAPE
from tests.support.masked_kill_run import MaskedEnd, MaskedRun
from tests.support.turns_kill_plan import KILLS as TURNS_KILLS
from tests.support.turns_kill_plan import SHAPE as TURNS_SHAPE

RUNS: Mapping[str, tuple[Shape, Sequence[Kill]]] = {
    "undisturbed": (SHAPE, ()),
    "coordinator_run": (SHAPE, COORDINATOR_KILLS),
    "agent_run": (SHAPE, AGENT_KILLS),
    "alternating_undisturbed": (ALTERNATING_SHAPE, ()),
    "alternating_run": (ALTERNATING_SHAPE, ALTERNATING_KILLS),
    "turns_undisturbed": (TURNS_SHAPE, ()),
    "turns_run": (TURNS_SHAPE, TURNS_KILLS),
    "masked_undisturbed": (MASKED_SHAPE, ()),
    "masked_run": (MASKED_SHAPE, MASKED_KILLS),
}


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, Future[Any]]]:
    """Those that tests of this session ask for, by the names of their fixtures."""
    root = tmp_path_factory.mktemp("crash")
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    begin: dict[str, Callable[[], object]] = {}
    with ThreadPoolExecutor(len(RUNS) + 1) as pool, ExitStack() as stack:
        first: dict[str, MortalFederation] = {}
        for name, (shape, kills) in RUNS.items():
            if name not in asked:
                continue
            processes = stack.enter_context(processes_in(root / name))
            if shape.federation not in first:
                federation = first[shape.federation] = MortalFederation(root / name, shape, processes)
                federation.set_up()
            else:
                federation = first[shape.federation].copy(root / name, processes)
            run: MaskedRun | Executioner = (
                MaskedRun(federation, kills) if shape.secure else Executioner(federation, kills)
            )
            begin[name] = run.run
            stack.callback(run.give_up)
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
def alternating_undisturbed(runs: Mapping[str, Future[KillRun]]) -> KillRun:
    return runs["alternating_undisturbed"].result()


@pytest.fixture(scope="session")
def alternating_run(runs: Mapping[str, Future[KillRun]]) -> KillRun:
    return runs["alternating_run"].result()


@pytest.fixture(scope="session")
def turns_undisturbed(runs: Mapping[str, Future[KillRun]]) -> KillRun:
    return runs["turns_undisturbed"].result()


@pytest.fixture(scope="session")
def turns_run(runs: Mapping[str, Future[KillRun]]) -> KillRun:
    return runs["turns_run"].result()


@pytest.fixture(scope="session")
def masked_undisturbed(runs: Mapping[str, Future[MaskedEnd]]) -> MaskedEnd:
    return runs["masked_undisturbed"].result()


@pytest.fixture(scope="session")
def masked_run(runs: Mapping[str, Future[MaskedEnd]]) -> MaskedEnd:
    return runs["masked_run"].result()


@pytest.fixture(scope="session")
def told(runs: Mapping[str, Future[Told]]) -> Told:
    return runs["told"].result()
