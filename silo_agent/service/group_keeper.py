"""Keeps this silo's release groups: takes the links that follow the one it holds, and signs what it or its people
allow.

Looked at again whenever the coordinator tells of news, when people have spoken (`wake`), and before a roster of other
groups is answered. What fails is tried again; what this silo refuses waits for news.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from lorica_security.errors import LoricaError, PolicyRefusal, Unreachable
from lorica_security.secure_aggregation.groups.release_groups import Link
from silo_agent.service.certificate_keeper import Wait


class GroupsPort(Protocol):
    async def sync(self) -> str | None:
        """Take and sign what is to be; why people must decide about something, or None. Raises a LoricaError."""


class GroupKeeper:
    """`told` hears of failures and of what waits for people: an event, and fields to log; `refused` a rule and its
    detail.

    `waits` hears, each time, whether anything waits for people.
    """

    def __init__(
        self,
        groups: GroupsPort,
        *,
        backoff: Wait,
        told: Callable[..., None],
        refused: Callable[[str, str], None],
        waits: Callable[[bool], None] = lambda waits: None,
    ) -> None:
        self._tells_waiting = waits
        self._groups = groups
        self._backoff = backoff
        self._told = told
        self._refused = refused
        self._at_coordinator = b""
        self._waits: str | None = None
        self._news = asyncio.Event()
        self._alone = asyncio.Lock()

    def heard(self, digest: bytes) -> None:
        """What stands for the chain and the proposal of the coordinator."""
        if digest != self._at_coordinator:
            self._at_coordinator = digest
            self._news.set()

    def wake(self) -> None:
        self._news.set()

    async def sync(self) -> None:
        """Once, now. Raises a LoricaError."""
        async with self._alone:
            waits = await self._groups.sync()
        if waits is not None and waits != self._waits:
            self._told("release-groups-wait", detail=waits, remedy="silo-agent groups show")
        self._waits = waits
        self._tells_waiting(waits is not None)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self.sync()
            except LoricaError as error:
                self._told("release-groups", detail=str(error))
                if isinstance(error, PolicyRefusal):
                    self._refused(error.rule, str(error))
                if not isinstance(error, Unreachable):
                    continue
                self._news.set()
                await asyncio.sleep(self._backoff.wait_s())
            else:
                self._backoff.reset()


def described(link: Link) -> str:
    """For people: which silos are in which group."""
    return "; ".join(", ".join(group) for group in link.partition.groups)
