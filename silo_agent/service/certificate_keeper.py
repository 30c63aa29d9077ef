"""Keeps this silo's certificate fresh: at two thirds of its life, and at once when the coordinator trusts other
authorities.

One renewal at a time, each try with a new TLS key; the identity key, which other silos pin, stays. What fails is tried
again, also when the certificate has ended: the silo has to be invited anew then, unless it is this machine's clock that
is wrong. Which of the two, people know; so each try says both, and once the clock is right nobody has to start the
agent again.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from lorica_security.errors import LoricaError

LONGEST_WAIT_S = 60.0
"""However far the next renewal is: the clock may be set meanwhile."""


_ENDED = (
    "this silo's certificate has expired, by this machine's clock: set the clock if it is wrong; else have the "
    "operator run `coordinator invite`, then `silo-agent enroll` into a new folder"
)


class CertificatePort(Protocol):
    """The certificate that this silo connects with. Times are Unix seconds."""

    @property
    def due_unix_s(self) -> float:
        """When it is to be renewed."""

    @property
    def expires_unix_s(self) -> float: ...

    @property
    def trust_digest(self) -> bytes:
        """Of the trust bundle that came with it."""

    async def renew(self) -> None:
        """One try. What it got is durable, and connected with, when it returns; raises a LoricaError otherwise."""


class Wait(Protocol):
    """How long to wait before the next try."""

    def wait_s(self) -> float: ...

    def reset(self) -> None: ...


class CertificateKeeper:
    """`told` hears of each renewal and of each try that failed: an event, and fields to log."""

    def __init__(
        self,
        certificate: CertificatePort,
        *,
        backoff: Wait,
        told: Callable[..., None],
        expires: Callable[[float], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._certificate = certificate
        self._backoff = backoff
        self._told = told
        self._expires = expires
        self._clock = clock
        self._trust_at_coordinator = b""
        self._heard = asyncio.Event()

    def heard(self, trust_digest: bytes) -> None:
        """The digest of the trust bundle that stands at the coordinator."""
        if trust_digest != self._trust_at_coordinator:
            self._trust_at_coordinator = trust_digest
            self._heard.set()

    async def run(self) -> None:
        """Until cancelled."""
        self._expires(self._certificate.expires_unix_s)
        while True:
            await self._until_wanted()
            wait = self._backoff.wait_s()
            try:
                await self._certificate.renew()
            except LoricaError as error:
                ended = self._clock() > self._certificate.expires_unix_s
                detail = f"{_ENDED} ({error})" if ended else str(error)
                self._told("certificate-not-renewed", detail=detail, next_try_s=round(wait, 1))
            else:
                self._expires(self._certificate.expires_unix_s)
                self._told("certificate-renewed", valid_until_unix_s=round(self._certificate.expires_unix_s))
                if not self._wanted:
                    self._backoff.reset()
                    continue
            await asyncio.sleep(wait)  # also after one that helped nothing: nobody makes this silo renew all the time

    @property
    def _wanted(self) -> bool:
        foreign = self._trust_at_coordinator not in (b"", self._certificate.trust_digest)
        return foreign or self._clock() >= self._certificate.due_unix_s

    async def _until_wanted(self) -> None:
        while not self._wanted:
            self._heard.clear()
            left = self._certificate.due_unix_s - self._clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(max(left, 0.0), LONGEST_WAIT_S)):
                    await self._heard.wait()
