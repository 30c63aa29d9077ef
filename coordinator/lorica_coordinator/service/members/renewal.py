"""What a silo that is enrolled keeps fresh: its certificate, the authorities it trusts, its identity key."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from lorica_coordinator.rounds.states import Masking, State
from lorica_coordinator.service.issued import IssuedCertificate, Trusted
from lorica_coordinator.service.members.held_trust import HeldTrusts
from lorica_coordinator.service.members.register import Register
from lorica_coordinator.service.ports import Clock, Keys, RoundStore
from lorica_coordinator.service.records import EnrolledSilo
from lorica_coordinator.service.threads import Threads
from lorica_security.errors import AuthorisationError, ConfigurationError, Conflict, StateError, Unreachable
from lorica_security.host.attempt_limit import AttemptLimit
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.identity.succession import Succession, check_possession
from silo_wire.statements import TRUST_DOMAIN, trust_statement

MOST_ACCESS_S = 3650 * 86_400
"""How long access from another host may hold: what federation.toml allows at most for its default, too."""
RENEWALS_AN_HOUR = 20
SUCCESSIONS_AN_HOUR = 20
HOUR_S = 3600.0
"""Each is kept, in the records and in the audit log: no silo may fill the disk with them."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """A silo's new certificate, and what it is to trust, signed by the coordinator's identity key."""

    certificate_pem: bytes
    trusted: Trusted
    signature: bytes


class Renewal:
    def __init__(
        self,
        *,
        federation: FederationName,
        store: RoundStore,
        keys: Keys,
        register: Register,
        held: HeldTrusts,
        clock: Clock,
        threads: Threads,
        state: Callable[[], State],
    ) -> None:
        self._federation = federation
        self._store = store
        self._keys = keys
        self._register = register
        self._held = held
        self._clock = clock
        self._threads = threads
        self._state = state
        self._renewals = AttemptLimit(most=RENEWALS_AN_HOUR, window_s=HOUR_S)
        self._successions = AttemptLimit(most=SUCCESSIONS_AN_HOUR, window_s=HOUR_S)
        self.on_change: list[Callable[[], None]] = []

    async def renew(self, silo: SiloName, *, csr_der: bytes, identity_endorsement: bytes) -> Renewed:
        """A certificate for a new TLS key. The one before stays good until it ends: the answer may get lost.

        Raises IntegrityError where the enrolled identity key did not endorse the request, what `Keys.recertify` raises,
        and Unreachable for a silo that renews all the time.
        """
        _count(self._renewals, f"silo {silo}", "renewals of its certificate", RENEWALS_AN_HOUR)
        enrolled = await self._enrolled(silo)
        now = self._clock()
        certificate = self._keys.recertify(
            silo,
            csr_der=csr_der,
            identity_public_key=enrolled.identity_public_key,
            identity_endorsement=identity_endorsement,
            now=now,
        )
        trusted = self._keys.trusted
        await self._threads.store(
            lambda: self._store.renew(
                silo,
                certificate,
                identity_public_key=enrolled.identity_public_key,
                trust=trusted.digest.hex(),
                at=now,
            )
        )
        _log.info("certificate renewed", silo=silo, certificate=certificate.entry.serial)
        return self._issued(certificate, trusted)

    async def grant(self, identity: Identity, *, csr_der: bytes, valid_s: float, renews: bool = False) -> Renewed:
        """A certificate for an operator or viewer on another host, who made the key; `renews`: in place of a good one.

        Raises MalformedMessage or AuthorisationError for a request that is not for just this name, ConfigurationError
        for less than a second or more than MOST_ACCESS_S.
        """
        if not 1 <= valid_s <= MOST_ACCESS_S:
            raise ConfigurationError(f"access valid for {valid_s:.0f} seconds is not allowed: use 1 to {MOST_ACCESS_S}")
        certificate = self._keys.grant(identity, csr_der=csr_der, valid_s=valid_s, now=self._clock())
        trusted = self._keys.trusted
        await self._threads.store(lambda: self._store.grant(certificate, trust=trusted.digest.hex(), renews=renews))
        _log.info("access granted", identity=identity.uri, certificate=certificate.entry.serial)
        return self._issued(certificate, trusted)

    def _issued(self, certificate: IssuedCertificate, trusted: Trusted) -> Renewed:
        """One that is stored: let in from now on, and the answer that brings it with `trusted`."""
        self._held.sent(certificate.entry.identity, certificate.entry.serial)
        self._register.issued(certificate.entry)
        for changed in self.on_change:
            changed()
        return renewed(self._federation, self._keys, certificate, trusted)

    async def renew_access(self, identity: Identity, *, csr_der: bytes, expires_unix_s: float) -> Renewed:
        """The same anew for one who calls with a certificate that ends then, and so does the new one.

        No other key endorses it: a stolen one must not gain time. Raises what `grant` does, and Unreachable for one who
        renews all the time.
        """
        _count(self._renewals, identity.uri, "renewals of its certificate", RENEWALS_AN_HOUR)
        left = int(expires_unix_s) - int(self._clock())
        return await self.grant(identity, csr_der=csr_der, valid_s=left, renews=True)

    async def succeed(self, silo: SiloName, succession: Succession, possession: bytes) -> None:
        """The silo signs with another identity key from now on; the same again is acknowledged.

        Raises IntegrityError for a statement that is not signed by both keys, Conflict where the predecessor is not the
        key that is enrolled, StateError while an attempt of secure aggregation knows the silo by that key, Unreachable
        for a silo that changes its key all the time.
        """
        identity = Identity(self._federation, Role.SILO, silo)
        old, new = succession.predecessor, succession.successor
        succession.check(identity)
        check_possession(possession, identity=identity, old_key=old, new_key=new)
        enrolled = await self._enrolled(silo)
        if enrolled.identity_public_key == public_key_bytes(new):
            if (await self._threads.store(self._store.successions, silo))[-1:] == (succession,):
                return
            raise Conflict(
                f"identity key {public_key_bytes(new).hex()} of silo {silo} was not named by that predecessor"
            )
        others = await self._threads.store(self._store.silos)
        if any(other.identity_public_key == public_key_bytes(new) for other in others):
            raise Conflict(f"identity key {public_key_bytes(new).hex()} is that of another silo: make a new one")
        if _signs_in(self._state(), silo):
            raise StateError(
                f"secure aggregation is under way and knows silo {silo} by its present identity key: "
                "try again when the round has been summed"
            )
        _count(self._successions, f"silo {silo}", "changes of its identity key", SUCCESSIONS_AN_HOUR)
        # An attempt that opens in this moment may still take the old key: the silo is dropped from that one then.
        await self._threads.store(lambda: self._store.succeed(silo, succession, at=self._clock()))
        _log.info("identity key succeeded", silo=silo, key=public_key_bytes(new).hex())

    async def _enrolled(self, silo: SiloName) -> EnrolledSilo:
        enrolled = await self._threads.store(self._store.silo, silo)
        if enrolled is None:
            raise AuthorisationError(f"silo {silo} is not enrolled in this federation: enrol it with a new invitation")
        return enrolled


def _count(limit: AttemptLimit, who: str, what: str, most: int) -> None:
    now = time.monotonic()
    if wait := limit.seconds_to_wait(who, now):
        raise Unreachable(f"{who} has asked for {most} {what} within {HOUR_S:.0f} s: it is heard again in {wait:.0f} s")
    limit.count(who, now)


def renewed(federation: FederationName, keys: Keys, certificate: IssuedCertificate, trusted: Trusted) -> Renewed:
    """What goes out with a new certificate, signed."""
    statement = trust_statement(
        federation=federation,
        trust=trusted.digest,
        since=trusted.since,
        certificate=bytes.fromhex(certificate.entry.digest),
    )
    return Renewed(certificate_pem=certificate.pem, trusted=trusted, signature=keys.sign(TRUST_DOMAIN, statement))


def _signs_in(state: State, silo: SiloName) -> bool:
    """Whether an attempt of secure aggregation is open, or about to be, with this silo."""
    return isinstance(state, Masking) and silo in state.silos
