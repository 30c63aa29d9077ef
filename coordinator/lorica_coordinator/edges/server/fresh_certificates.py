"""Keeps what the coordinator itself shows fresh: its certificate, the operator's on this host, and the authorities."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime

import structlog

from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.server.presented import Presented
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.members.authority_succession import AuthoritySteps
from lorica_security.errors import LoricaError, kind_of

LONGEST_WAIT_S = 60.0
"""However far the next renewal is: the clock may be set meanwhile."""
RETRY_S = 60.0

_log = structlog.get_logger(__name__)


class FreshCertificates:
    """Call `look` once, then keep `run` going; it looks again when something is due, or has changed."""

    def __init__(
        self, *, keys: KeyStore, service: Federation, metrics: CoordinatorMetrics, presented: Presented
    ) -> None:
        self._keys = keys
        self._steps: AuthoritySteps = service.authorities
        self._register = service.register
        self._metrics = metrics
        self._presented = presented
        self._changed = asyncio.Event()
        service.authorities.on_change.append(self._changed.set)
        service.renewal.on_change.append(self._changed.set)
        service.held.on_arrived.append(self._changed.set)
        service.enrolment.on_change.append(self._changed.set)
        self._tell()

    async def run(self) -> None:
        """Until cancelled. What fails is told, counted and tried again: the certificates at hand are good for a
        while."""
        while True:
            self._changed.clear()
            wait = LONGEST_WAIT_S
            try:
                await self._show()  # first: whatever keeps a succession from going on, the certificate is renewed
                await self._steps.advance()
                await self._show()
                for silo, expires in (await self._steps.silo_expiries()).items():
                    self._metrics.silo_certificate_expiry.labels(silo).set(expires)
                wait = min(wait, max(0.0, (self._presented.pair.renewal_due - datetime.now(UTC)).total_seconds()))
            except LoricaError as error:
                kind = kind_of(error).__name__
                _log.error("certificates could not be renewed, it is tried again", kind=kind, error=str(error))
                self._metrics.refused(kind)
                wait = RETRY_S
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._changed.wait()

    async def _show(self) -> None:
        """From the next handshake on: the certificate of the authority that issues now, renewed if it is due."""
        now = datetime.now(UTC)  # what TLS goes by
        before = self._presented.pair
        pair = self._keys.server_pair(now)
        operator = self._keys.due_operator_pair(now)
        await self._register.add(operator.entry(now))  # before a command on this host can find it
        self._keys.keep_operator_pair(operator)
        self._presented.show(pair, self._keys.trust)
        if pair != before:
            _log.info("own certificate renewed", expires=pair.expires.isoformat())
        self._tell()

    def _tell(self) -> None:
        self._metrics.certificate_expiry.set(self._presented.pair.expires.timestamp())
        self._metrics.authority_expiry.set(self._keys.authority.certificate.not_valid_after_utc.timestamp())
