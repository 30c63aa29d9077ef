"""Wall clocks that go wrong under a running coordinator and its agents, beyond certificates' lives, and are right again.

Nobody starts anything anew, nobody is shut out afterwards, and what is wrong is said by name meanwhile. Deadlines are in
tests/unit/test_rounds_clock.py, the words that agents say in tests/unit/test_agent_grpc_client.py.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from coordinator.edges import fresh_certificates, gate
from coordinator.edges.key_store import KeyStore
from security.chain import Head
from security.errors import LoricaError, OutsideValidity
from security.pki.validity import Window
from silo_agent.edges.backoff import Backoff
from silo_agent.edges.channel import mutual_channel
from silo_agent.edges.grpc_client import GrpcCoordinator
from silo_agent.edges.model_cache import ModelCache
from silo_wire.canonical import digest_of
from tests.support.coordinator import HOSPITAL, PATIENCE_S, FederationTemplate, RunningCoordinator, running
from tests.support.coordinator import federation_template as federation_template
from tests.support.coordinator_service import FEDERATION, load_keys

BEYOND = {"expired at": timedelta(days=30), "is not valid before": timedelta(days=-1)}
"""What is said of a certificate, and by how much a clock is wrong then."""
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


def test_what_the_coordinator_made_while_its_clock_was_ahead_is_made_anew(tmp_path: Path) -> None:
    KeyStore.create(tmp_path / "keys", FEDERATION, datetime.now(UTC))
    keys, now = load_keys(tmp_path), datetime.now(UTC)
    for make in (keys.server_pair, keys.operator_pair):
        ahead = make(now + timedelta(days=365))
        assert Window.of(ahead.certificate).problem_at(now) is not None
        right = make(now)
        assert Window.of(right.certificate).problem_at(now) is None
        assert make(now) == right, "it is kept"
