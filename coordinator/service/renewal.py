"""What a silo that is enrolled keeps fresh: its certificate, the authorities it trusts, its identity key."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from coordinator.rounds.states import Masking, State
from coordinator.service.ports import Clock, Keys, RoundStore
from coordinator.service.records import EnrolledSilo
from coordinator.service.register import Register
from coordinator.service.threads import Threads
from security.attempt_limit import AttemptLimit
from security.errors import AuthorisationError, Conflict, StateError, Unreachable
from security.identifiers import FederationName, Identity, Role, SiloName
from security.pki.identity_key import public_key_bytes
from security.pki.succession import Succession, check_possession
from silo_wire.statements import TRUST_DOMAIN, trust_statement

RENEWALS_AN_HOUR = 20
SUCCESSIONS_AN_HOUR = 20
HOUR_S = 3600.0
"""Each is kept, in the records and in the audit log: no silo may fill the disk with them."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """A silo's new certificate, and what it is to trust, signed by the coordinator's identity key."""

    certificate_pem: bytes
    trust_bundle_pem: bytes
    signature: bytes


class Renewal:
    def __init__(
        self,
        *,
        federation: FederationName,
        store: RoundStore,
        keys: Keys,
        register: Register,
        clock: Clock,
        threads: Threads,
        state: Callable[[], State],
    ) -> None:
        self._federation = federation
        self._store = store
        self._keys = keys
        self._register = register
        self._clock = clock
        self._threads = threads
        self._state = state
        self._renewals = AttemptLimit(most=RENEWALS_AN_HOUR, window_s=HOUR_S)
        self._successions = AttemptLimit(most=SUCCESSIONS_AN_HOUR, window_s=HOUR_S)
        self.on_change: list[Callable[[], None]] = []

    async def renew(self, silo: SiloName, *, csr_der: bytes, identity_endorsement: bytes) -> Renewed:
        """A certificate for a new TLS key. The one before stays good until it ends: the answer may get lost.

        Raises IntegrityError where the enrolled identity key did not endorse the request, what `Keys.recertify` raises, and
        Unreachable for a silo that renews all the time.
        """
        _count(self._renewals, silo, "renewals of its certificate", RENEWALS_AN_HOUR)
        enrolled = await self._enrolled(silo)
        now = self._clock()
        certificate = self._keys.recertify(
            silo,
            csr_der=csr_der,
            identity_public_key=enrolled.identity_public_key,
            identity_endorsement=identity_endorsement,
            now=now,
        )
        bundle, digest = self._keys.trust_bundle_pem, self._keys.trust_digest
        await self._threads.store(
            lambda: self._store.renew(
                silo,
                certificate,
                identity_public_key=enrolled.identity_public_key,
                trust=digest.hex(),
                at=now,
            )
        )
        self._register.issued(certificate.entry)
        _log.info("certificate renewed", silo=silo, certificate=certificate.entry.serial)
        for changed in self.on_change:
            changed()
        statement = trust_statement(federation=self._federation, trust=digest)
        return Renewed(
            certificate_pem=certificate.pem,
            trust_bundle_pem=bundle,
            signature=self._keys.sign(TRUST_DOMAIN, statement),
        )

    async def succeed(self, silo: SiloName, succession: Succession, possession: bytes) -> None:
        """The silo signs with another identity key from now on; the same again is acknowledged.

        Raises IntegrityError for a statement that is not signed by both keys, Conflict where the predecessor is not the key
        that is enrolled, StateError while an attempt of secure aggregation knows the silo by that key, Unreachable for a silo that
        changes its key all the time.
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
        _count(self._successions, silo, "changes of its identity key", SUCCESSIONS_AN_HOUR)
        # An attempt that opens in this moment may still take the old key: the silo is dropped from that one then.
        await self._threads.store(lambda: self._store.succeed(silo, succession, at=self._clock()))
        _log.info("identity key succeeded", silo=silo, key=public_key_bytes(new).hex())

    async def _enrolled(self, silo: SiloName) -> EnrolledSilo:
        enrolled = await self._threads.store(self._store.silo, silo)
        if enrolled is None:
            raise AuthorisationError(f"silo {silo} is not enrolled in this federation: enrol it with a new invitation")
        return enrolled


def _count(limit: AttemptLimit, silo: SiloName, what: str, most: int) -> None:
    now = time.monotonic()
    if wait := limit.seconds_to_wait(silo, now):
        raise Unreachable(
            f"silo {silo} has asked for {most} {what} within {HOUR_S:.0f} s: it is heard again in {wait:.0f} s"
        )
    limit.count(silo, now)


def _signs_in(state: State, silo: SiloName) -> bool:
    """Whether an attempt of secure aggregation is open, or about to be, with this silo."""
    return isinstance(state, Masking) and silo in state.silos
