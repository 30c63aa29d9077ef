"""Agents of real silos, without training: the client, the certificate and its keeper, on a folder of their own."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lorica_security.errors import LoricaError
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, load_credentials, store_credentials
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.certificate import SiloCertificate
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.service.certificate_keeper import CertificateKeeper
from silo_wire.messages import Order
from tests.support.coordinator import PATIENCE_S


@dataclass
class KeptAgent:
    """Attends, and keeps its certificate fresh. `orders` are all that came."""

    folder: SiloFolder
    coordinator: GrpcCoordinator
    certificate: SiloCertificate
    keeper: CertificateKeeper
    keeping: asyncio.Task[None]
    orders: list[Order] = field(default_factory=list)
    notes: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    problems: list[LoricaError] = field(default_factory=list)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def stored(self) -> SiloCredentials:
        """What a restart would find."""
        return load_credentials(self.folder)

    def times(self, event: str) -> int:
        return sum(name == event for name, _ in self.notes)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(holds)

    async def order(self, kind: type[Any]) -> Any:
        await self.until(lambda: bool(self.orders) and isinstance(self.orders[-1], kind))
        return self.orders[-1]

    async def _attend(self) -> None:
        async for order in self.coordinator.orders():
            self.orders.append(order)
            await self._tell()

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def silo_at(root: Path, credentials: SiloCredentials, address: str) -> SiloFolder:
    """A silo's folder with these credentials, enrolled at this address."""
    folder = SiloFolder(root)
    store_credentials(folder, replace(credentials, address=address))
    folder.make()
    return folder


@asynccontextmanager
async def kept_agent(folder: SiloFolder, *, attend: bool = True) -> AsyncGenerator[KeptAgent, None]:
    credentials = load_credentials(folder)
    problems: list[LoricaError] = []
    coordinator = GrpcCoordinator(
        channel=mutual_channel(credentials),
        credentials=credentials,
        models=ModelCache(folder.models, kept=1),
        agent_version="test",
        unreachable=lambda problem, seconds: problems.append(problem),
        new_backoff=lambda: Backoff(first_s=0.02, most_s=0.1),
        instance=credentials.silo.encode().ljust(16, b"\0")[:16],
    )
    certificate = SiloCertificate(folder, credentials, coordinator)
    notes: list[tuple[str, dict[str, Any]]] = []
    waiting: set[asyncio.Task[None]] = set()

    def told(event: str, **fields: Any) -> None:
        notes.append((event, fields))
        waiting.add(asyncio.create_task(agent._tell()))

    keeper = CertificateKeeper(
        certificate, backoff=Backoff(first_s=0.02, most_s=0.1), told=told, expires=lambda unix_s: None
    )
    tasks = [asyncio.create_task(keeper.run())]
    agent = KeptAgent(folder, coordinator, certificate, keeper, tasks[0], notes=notes, problems=problems)
    coordinator.on_trust = keeper.heard
    if attend:
        tasks.append(asyncio.create_task(agent._attend()))
    try:
        yield agent
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in (*tasks, *waiting):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, *waiting, return_exceptions=True)
        await coordinator.close()
