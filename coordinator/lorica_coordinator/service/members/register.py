"""Which certificates open the door: those that were issued here, byte for byte, and that nobody has revoked.

The authority's signature alone is not enough. Who stole its key, or kept a certificate of a silo that was enrolled anew
since, has one that it signed and that is not in this register. A thief chooses the serial, and those are no secrets:
hence the digest.
"""

from collections.abc import Callable
from datetime import UTC, datetime

import structlog

from lorica_coordinator.service.issued import Certificate
from lorica_coordinator.service.ports import Clock, RoundStore
from lorica_coordinator.service.threads import Threads
from lorica_security.errors import AuthenticationError, AuthorisationError, StateError
from lorica_security.identifiers import Identity

_log = structlog.get_logger(__name__)


class Register:
    """`on_revoked` are told each identity that has just lost its certificates."""

    def __init__(self, *, store: RoundStore, threads: Threads, clock: Clock) -> None:
        self._store = store
        self._threads = threads
        self._clock = clock
        self._known: dict[str, Certificate] = {}
        self.on_revoked: list[Callable[[Identity], None]] = []

    async def reload(self) -> None:
        """Take up what the store has; whoever wrote to it by another way calls this."""
        found = await self._threads.store(self._store.certificates)
        self._known = {certificate.serial: certificate for certificate in found}

    def certificates(self) -> tuple[Certificate, ...]:
        return tuple(self._known.values())

    def require(self, identity: Identity, serial: str, digest: str) -> None:
        """Raise AuthenticationError for a certificate that is not registered, AuthorisationError for one that was
        revoked."""
        held = self._known.get(serial)
        if held is None or held.identity != identity or held.digest != digest:
            raise AuthenticationError(
                f"certificate {serial} of {identity.uri} is not in the coordinator's register: it was not issued "
                "here, or before the state was restored; have a new one issued"
            )
        if held.revoked_unix_s is not None:
            at = datetime.fromtimestamp(held.revoked_unix_s, UTC).isoformat(timespec="seconds")
            raise AuthorisationError(
                f"certificate {serial} of {identity.uri} was revoked or replaced at {at}: ask the coordinator's "
                "operator"
            )

    def lets_in(self, identity: Identity, now: float) -> bool:
        """Whether any certificate of `identity` is good at `now`, Unix seconds."""
        return any(
            item.identity == identity and item.revoked_unix_s is None and item.expires_unix_s > now
            for item in self._known.values()
        )

    async def add(self, certificate: Certificate) -> None:
        """Once: the same again changes nothing."""
        if certificate.serial in self._known:
            return
        await self._threads.store(self._store.register, certificate)
        self._known[certificate.serial] = certificate

    def issued(self, certificate: Certificate) -> None:
        """Let in one that the store has already."""
        self._known.setdefault(certificate.serial, certificate)  # what a revocation has reloaded since stays revoked

    async def revoke(self, identity: Identity, *, known: bool = False) -> None:
        """Every certificate of `identity`, from now on; the same again is acknowledged.

        Raises StateError where the register has none and it is not `known` otherwise.
        """
        if not known and not any(item.identity == identity for item in self._known.values()):
            raise StateError(
                f"{identity.uri} has no certificate that could be revoked, and no open invitation: coordinator status "
                "names the silos"
            )
        await self._threads.store(self._store.revoke, identity, self._clock())
        await self.reload()
        _log.warning("revoked", identity=identity.uri)
        self.cut(identity)

    def cut(self, identity: Identity) -> None:
        """Tell that `identity` has lost the certificates that it had."""
        for told in self.on_revoked:
            told(identity)
