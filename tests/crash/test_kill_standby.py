"""kill -9 of a coordinator whose state is in PostgreSQL, while a second one stands by: that one takes over the same
round, and the model has the bits of a run that nobody disturbs, whose state is in the folder.

Two kills of a masked round; with LORICA_EVERY_KILL=1 all those of the other crash tests, in clear as well
(`make crash-postgresql`).
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from lorica.soak.comparison import differences
from lorica.soak.federation import COORDINATOR, MortalFederation, Shape
from tests.support import kill_plan, masked_kill_plan
from tests.support.audit_logs import check_audit_logs
from tests.support.byte_search import Needles
from tests.support.kill_run import Executioner, Kill, KillRun, check_the_round, check_work_was_done_once, processes_in
from tests.support.masked_kill_run import MaskedEnd, MaskedRun
from tests.support.postgresql import PostgresqlServer, running_postgresql
from tests.support.standby_run import StandbyExecutioner, StandbyFederation

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

EVERY = os.environ.get("LORICA_EVERY_KILL") == "1"


MASKED, MASKED_KILLS = (
    (masked_kill_plan.SHAPE, masked_kill_plan.KILLS)
    if EVERY
    else (
        replace(masked_kill_plan.SHAPE, values={**masked_kill_plan.SHAPE.values, "schedule.rounds": 1}),
        (
            Kill(process=COORDINATOR, point="vector-accepted", round=1),
            Kill(process=COORDINATOR, point="unmasked", round=1),
        ),
    )
)


@dataclass(frozen=True)
class Pair:
    """The same plan, in the folder undisturbed, and in PostgreSQL under kills."""

    undisturbed: KillRun
    killed: KillRun


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


def federations(
    root: Path, shape: Shape, server: PostgresqlServer, stack: ExitStack
) -> tuple[MortalFederation, StandbyFederation]:
    alone = MortalFederation(root / "alone", shape, stack.enter_context(processes_in(root / "alone")))
    alone.set_up()
    twin = alone.copy(root / "pair", stack.enter_context(processes_in(root / "pair")))
    pair = StandbyFederation(twin.root, shape, twin.processes)
    pair.keep_state_in(server, shape.federation)
    return alone, pair


@pytest.fixture(scope="module")
def clear(tmp_path_factory: pytest.TempPathFactory, server: PostgresqlServer) -> Iterator[Pair]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        alone, pair = federations(tmp_path_factory.mktemp("clear"), kill_plan.SHAPE, server, stack)
        runs = Executioner(alone, ()), StandbyExecutioner(pair, kill_plan.COORDINATOR_KILLS)
        for run in runs:
            stack.callback(run.give_up)
        undisturbed, killed = pool.submit(runs[0].run), pool.submit(runs[1].run)
        yield Pair(undisturbed.result(), killed.result())


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory, server: PostgresqlServer) -> Iterator[tuple[MaskedEnd, MaskedEnd]]:
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        alone, pair = federations(tmp_path_factory.mktemp("masked"), MASKED, server, stack)
        runs = MaskedRun(alone, ()), MaskedRun(pair, MASKED_KILLS, executioner=StandbyExecutioner)
        for run in runs:
            stack.callback(run.give_up)
        undisturbed, killed = pool.submit(runs[0].run), pool.submit(runs[1].run)
        yield undisturbed.result(), killed.result()


def check_the_take_overs(killed: KillRun) -> None:
    """Each death of a coordinator was followed by the other one's term, and its own kills came all."""
    federation = killed.federation
    assert isinstance(federation, StandbyFederation)
    of_the_coordinator = [death for death in killed.deaths if death.kill.process == COORDINATOR]
    assert len(federation.took_over) >= len(of_the_coordinator) - 1  # the last may have come as the plan ended


def check_rounds(killed: KillRun, undisturbed: KillRun) -> None:
    assert differences(undisturbed.result, killed.result) == []
    assert [row.attempt for row in killed.result.rounds] == [1] * len(killed.result.rounds)
    for row in undisturbed.result.rounds:
        check_the_round(row.round, killed, undisturbed)
    check_work_was_done_once(killed)
    federation = killed.federation
    check_audit_logs(federation.folder, [federation.agent(silo) for silo in federation.shape.silos])


@pytest.mark.skipif(not EVERY, reason="LORICA_EVERY_KILL=1, or make crash-postgresql")
def test_a_standby_takes_over_each_round_of_a_plan_in_clear(clear: Pair) -> None:
    assert [death.kill for death in clear.killed.deaths] == list(kill_plan.COORDINATOR_KILLS)
    check_the_take_overs(clear.killed)
    check_rounds(clear.killed, clear.undisturbed)


def test_a_standby_takes_over_each_attempt_under_masks(masked: tuple[MaskedEnd, MaskedEnd]) -> None:
    undisturbed, killed = masked
    assert {death.kill for death in killed.run.deaths} == set(MASKED_KILLS)
    check_the_take_overs(killed.run)
    check_rounds(killed.run, undisturbed.run)
    drawn = {who: count for who, count in killed.draws.items() if who.startswith(COORDINATOR)}
    assert set(drawn.values()) == {1}, "no attempt was begun twice"


def test_and_no_file_of_the_server_has_what_silos_revealed(
    masked: tuple[MaskedEnd, MaskedEnd], server: PostgresqlServer
) -> None:
    _, killed = masked
    assert killed.left == {}
    assert len(killed.secrets) > 50
    server.execute("CHECKPOINT")
    assert Needles(killed.secrets).below(server.folder) == {}
    assert list((killed.run.federation.state / "attempt-keys").glob("*")) == []
