"""Calls to the coordinator over mutual TLS, and how they are tried again.

Every call may be repeated, so a call that finds the coordinator unreachable waits (backoff.py) and tries again until
its task is cancelled; so does one that is refused since a certificate does not hold by somebody's clock, which may be
set right. A word that a round needs (not ready, ready, trained, declined, an answer, scores, a ledger's head) is also
said again to a coordinator that could not store it. So each is said until it is taken, or until the coordinator says
that its time is over.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import grpc.aio

from lorica_security.audit.chain import Head
from lorica_security.errors import LoricaError, OutsideValidity, StorageError, Unreachable
from lorica_security.pki.validity import Window
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.connection import Wire
from silo_wire.canonical import Digest
from silo_wire.codecs.common_codec import NO_DIGEST, call_key
from silo_wire.transport import error_of
from silo_wire.v1 import common_pb2
from silo_wire.wire_version import Speaker

CALL_TIMEOUT_S = 30.0
PASSES = (Unreachable, OutsideValidity)
"""Troubles of the network and of clocks: they end by themselves, or people end them."""

T = TypeVar("T")


def _ignore(_: object) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Who counts what goes over the line: bytes of plans and chunks, and whether orders come."""

    sent: Callable[[int], None] = _ignore
    received: Callable[[int], None] = _ignore
    attending: Callable[[bool], None] = _ignore


class Calls:
    """What every call goes over, and how it is tried again. `unreachable` hears of each failed try, with the seconds
    until the next."""

    def __init__(
        self,
        *,
        channel: grpc.aio.Channel,
        credentials: SiloCredentials,
        models: ModelCache,
        agent_version: str,
        unreachable: Callable[[LoricaError, float], None],
        new_backoff: Callable[[], Backoff] = Backoff,
        instance: bytes = b"",
        log_head: Callable[[], Head] = Head,
        traffic: Traffic | None = None,
    ) -> None:
        """`instance` as in instance.py; without one, this client succeeds no other. `log_head`: how far this silo's
        audit log is."""
        self._wire = Wire(channel)
        self._credentials = credentials
        self._models = models
        self._agent_version = agent_version
        self._unreachable = unreachable
        self._new_backoff = new_backoff
        self._instance = instance or os.urandom(16)
        self._log_head = log_head
        self._traffic = traffic or Traffic()
        self._old_wires: set[asyncio.Task[None]] = set()
        self.on_trust: Callable[[bytes], None] = lambda digest: None
        """Hears, with each order, the digest of the trust bundle that stands at the coordinator."""
        self.on_groups: Callable[[bytes], None] = lambda digest: None
        """Hears, with each order, what stands for the coordinator's release groups."""
        self.on_speaker: Callable[[Speaker], None] = lambda speaker: None
        """Hears, as each stream of orders begins, which release the coordinator is and which wire it speaks."""

    def go_over(self, channel: grpc.aio.Channel, credentials: SiloCredentials) -> None:
        """New calls go over `channel` from now on, which shows these; the one before is closed once the last call on it
        has ended."""
        self._credentials = credentials
        before, self._wire = self._wire, Wire(channel)
        closing = asyncio.create_task(before.supersede())
        self._old_wires.add(closing)
        closing.add_done_callback(self._old_wires.discard)

    async def close(self) -> None:
        """Every channel, at once."""
        for closing in tuple(self._old_wires):
            closing.cancel()
        await asyncio.gather(*self._old_wires, return_exceptions=True)
        await self._wire.channel.close()

    async def _until_taken(self, word: Callable[[Wire], Awaitable[T]]) -> T:
        """`word` said until the coordinator has it, or says that it wants it no more: a LoricaError."""
        return await self._until_answered(word, passes=(*PASSES, StorageError))

    async def _until_answered(
        self, attempt: Callable[[Wire], Awaitable[T]], *, passes: tuple[type[LoricaError], ...] = PASSES
    ) -> T:
        """`attempt` over the channel of that moment, and over it alone: a transfer ends where it began."""
        backoff = self._new_backoff()
        while True:
            began = time.monotonic()
            try:
                async with self._wire.used() as wire:
                    return await attempt(wire)
            except grpc.aio.AioRpcError as error:
                problem = error_of(error)
            except Unreachable as error:
                problem = error
            if not isinstance(problem, passes):
                raise problem
            if time.monotonic() - began > CALL_TIMEOUT_S:
                backoff.reset()  # it worked for a while
            await self._wait(problem, backoff)

    async def _wait(self, problem: LoricaError, backoff: Backoff) -> None:
        seconds = backoff.wait_s()
        expired = Window.of(self._credentials.certificate).problem_at(datetime.now(UTC))
        if expired is not None and isinstance(problem, Unreachable):  # who refuses the handshake for that says less
            problem = Unreachable(f"this silo's certificate {expired} ({problem})")
        self._unreachable(problem, seconds)
        await asyncio.sleep(seconds)

    def _key(self, plan: Digest | None = None) -> common_pb2.CallKey:
        return call_key(
            federation=self._credentials.federation,
            silo=self._credentials.silo,
            plan=NO_DIGEST if plan is None else plan,
        )
