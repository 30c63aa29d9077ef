"""Wall clocks that go wrong under a running coordinator and its agents, beyond certificates' lives, and are right
again.

Nobody starts anything anew, nobody is shut out afterwards, and what is wrong is said by name meanwhile. More of
deadlines is in tests/unit/test_rounds_clock.py, the words that agents say in tests/unit/test_agent_grpc_client.py.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.server import fresh_certificates, gate
from lorica_coordinator.rounds.states import Collecting
from lorica_security.audit.chain import Head
from lorica_security.errors import LoricaError, OutsideValidity
from lorica_security.pki.validity import Window
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_wire.canonical import digest_of
from silo_wire.messages import Train
from tests.support.coordinator import HOSPITAL, PATIENCE_S, FederationTemplate, RunningCoordinator, running
from tests.support.coordinator import federation_template as federation_template
from tests.support.coordinator_service import (
    FEDERATION,
    AdjustableClock,
    Running,
    SiloStandIn,
    add_plan,
    load_keys,
    make_coordinator_folder,
)
from tests.support.coordinator_service import running as service_running
from tests.support.virtual_time import in_virtual_time

BEYOND = {"expired at": timedelta(days=30), "is not valid before": timedelta(days=-1)}
"""What is said of a certificate, and by how much a clock is wrong then."""
HOUR_S, YEAR_S = 3600.0, 365.25 * 86_400
HEAD = Head(1, digest_of(b"entry 1"))


class Moved(datetime):
    """`datetime` in a module whose clock is set."""

    by = timedelta(0)

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + cls.by


@pytest.fixture
def coordinators_clock(monkeypatch: pytest.MonkeyPatch) -> type[Moved]:
    """Where the coordinator judges certificates of calls, and makes its own. It looks at it often."""

    class Clock(Moved):
        pass

    for module in (gate, fresh_certificates):
        monkeypatch.setattr(module, "datetime", Clock)
    monkeypatch.setattr(gate, "LOOK_S", 0.05)
    monkeypatch.setattr(fresh_certificates, "LONGEST_WAIT_S", 0.05)
    monkeypatch.setattr(fresh_certificates, "RETRY_S", 0.05)
    return Clock


class Attending:
    """An agent's client that attends, and what it is told."""

    def __init__(self, client: GrpcCoordinator, troubles: list[LoricaError]) -> None:
        self.client, self.troubles = client, troubles
        self.orders = 0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        async for _ in self.client.orders():
            self.orders += 1
            await self.note()

    async def note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(holds)


@asynccontextmanager
async def attending(at: RunningCoordinator, template: FederationTemplate, folder: Path) -> AsyncIterator[Attending]:
    credentials = replace(template.silos[HOSPITAL], address=at.address)
    troubles: list[LoricaError] = []
    notes: set[asyncio.Task[None]] = set()

    def unreachable(problem: LoricaError, seconds: float) -> None:
        troubles.append(problem)
        notes.add(asyncio.ensure_future(agent.note()))

    client = GrpcCoordinator(
        channel=mutual_channel(credentials),
        credentials=credentials,
        models=ModelCache(folder, kept=2),
        agent_version="test",
        unreachable=unreachable,
        new_backoff=lambda: Backoff(first_s=0.01, most_s=0.05),
    )
    agent = Attending(client, troubles)
    work = asyncio.create_task(agent.run())
    try:
        await agent.until(lambda: agent.orders > 0)
        yield agent
    finally:
        work.cancel()
        await asyncio.gather(work, *notes, return_exceptions=True)
        await client.close()


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    async with running(federation_template.copy(tmp_path / "coordinator")) as coordinator:
        yield coordinator


@pytest.mark.parametrize("says", BEYOND)
async def test_a_coordinator_whose_clock_was_wrong_has_its_silos_back_once_it_is_right(
    coordinators_clock: type[Moved],
    at: RunningCoordinator,
    federation_template: FederationTemplate,
    tmp_path: Path,
    says: str,
) -> None:
    """What an agent has to say meanwhile it says until it is taken; it ends for nothing of this."""
    async with attending(at, federation_template, tmp_path / "models") as agent:
        coordinators_clock.by = BEYOND[says]
        word = asyncio.create_task(agent.client.countersign_ledger(HEAD, after=Head()))
        await agent.until(lambda: any(isinstance(problem, OutsideValidity) for problem in agent.troubles))
        said = str(next(problem for problem in agent.troubles if isinstance(problem, OutsideValidity)))
        assert says in said
        assert "the clock says" in said
        so_far = len(agent.troubles)
        await agent.until(lambda: len(agent.troubles) > so_far + 3)
        assert not word.done()

        coordinators_clock.by = timedelta(0)
        async with asyncio.timeout(PATIENCE_S):
            assert (await word).newest == HEAD


async def test_an_open_stream_is_cut_when_the_clock_goes_beyond_its_certificate_and_comes_again(
    coordinators_clock: type[Moved], at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """However far off that was by the clock with which the call began."""
    async with attending(at, federation_template, tmp_path / "models") as agent:
        coordinators_clock.by = BEYOND["expired at"]
        await agent.until(lambda: any(isinstance(problem, OutsideValidity) for problem in agent.troubles))
        before = agent.orders
        coordinators_clock.by = timedelta(0)
        await agent.until(lambda: agent.orders > before)


@pytest.mark.parametrize("years", [1, 7, -7])
async def test_by_a_clock_that_is_years_off_no_authority_follows_another(
    at: RunningCoordinator, federation_template: FederationTemplate, tmp_path: Path, years: int
) -> None:
    """There would be nobody to wait for: the authority of every silo would be retired within a minute."""
    before = at.coordinator.keys.authorities.standings()
    at.clock.ahead = years * 365 * 86_400.0
    await at.service.authorities.advance()
    assert at.coordinator.keys.authorities.standings() == before
    at.clock.ahead = 0.0
    async with attending(at, federation_template, tmp_path / "models") as agent:
        assert agent.orders


def test_what_the_coordinator_made_while_its_clock_was_ahead_is_made_anew(tmp_path: Path) -> None:
    KeyStore.create(tmp_path / "keys", FEDERATION, datetime.now(UTC))
    keys, now = load_keys(tmp_path), datetime.now(UTC)
    for make in (keys.server_pair, keys.operator_pair):
        ahead = make(now + timedelta(days=365))
        assert Window.of(ahead.certificate).problem_at(now) is not None
        right = make(now)
        assert Window.of(right.certificate).problem_at(now) is None
        assert make(now) == right, "it is kept"


# --- deadlines, in virtual time


@pytest.fixture(scope="module")
def new_coordinator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coordinator")
    make_coordinator_folder(folder)
    add_plan(folder, "short", schedule={"rounds": 1, "min_silos": 2, "training_deadline_s": 20.0})
    return folder


@pytest.fixture
def folder(new_coordinator: Path, tmp_path: Path) -> Path:
    copied = tmp_path / "coordinator"
    shutil.copytree(new_coordinator, copied)
    return copied


SILOS = ("bank-b", "hospital-a")


def virtual_clock() -> AdjustableClock:
    """The right time goes on with the loop's, from now on."""
    loop, now = asyncio.get_running_loop(), time.time()
    return AdjustableClock(right=lambda: now + loop.time(), steady=loop.time)


@asynccontextmanager
async def training(coordinator: Running, silos: Sequence[SiloStandIn]) -> AsyncIterator[None]:
    """Of the plan `short`: the silos were told to train, and do not."""
    await coordinator.service.start_plan("short")
    works = [
        asyncio.create_task(silo.work(coordinator.service, until=lambda order: isinstance(order, Train)))
        for silo in silos
    ]
    try:
        await coordinator.reaches(lambda state: isinstance(state, Collecting))
        yield
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


@pytest.mark.parametrize("by", [3 * HOUR_S, -3 * HOUR_S, YEAR_S, -YEAR_S])
def test_a_clock_that_is_set_and_right_again_moves_no_deadline(folder: Path, by: float) -> None:
    """It left a round at 10729 s left, under a deadline of 20 s."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        clock = virtual_clock()
        async with service_running(folder, clock=clock) as coordinator:
            silos = [await coordinator.enrolled(name) for name in SILOS]
            clock.ahead = by
            async with training(coordinator, silos):
                opened = loop.time()
                clock.ahead = -by
                await asyncio.sleep(5.0)
                assert (await coordinator.service.status()).seconds_left == pytest.approx(15.0, abs=0.1)
                clock.ahead = 0.0
                assert coordinator.metric("lorica_phase_deadline_timestamp_seconds") > 0
                await coordinator.reaches(lambda state: not isinstance(state, Collecting))
                assert loop.time() - opened == pytest.approx(20.0, abs=0.1)
            row = next(row for row in await coordinator.service.rounds() if row.round == 1)
            assert (row.outcome, {silo.outcome for silo in row.silos}) == ("abandoned", {"late"})

    in_virtual_time(main())


def test_a_restart_of_the_service_goes_on_with_what_was_left(folder: Path) -> None:
    async def main() -> None:
        clock = virtual_clock()
        async with service_running(folder, clock=clock) as coordinator:
            silos = [await coordinator.enrolled(name) for name in SILOS]
            async with training(coordinator, silos):
                await asyncio.sleep(8.0)
        clock.ahead = -YEAR_S
        await asyncio.sleep(HOUR_S)
        async with service_running(folder, clock=clock) as coordinator:
            assert (await coordinator.service.status()).seconds_left == pytest.approx(12.0, abs=0.1)

    in_virtual_time(main())
