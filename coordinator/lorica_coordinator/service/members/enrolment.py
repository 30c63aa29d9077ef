"""Invitations, and the silos that accept them. A token is spent in the same transaction that stores its silo."""

import asyncio
import secrets
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from lorica_coordinator.rounds.events import SiloEnrolled, SiloRevoked
from lorica_coordinator.service.loop.round_loop import RoundLoop
from lorica_coordinator.service.members.register import Register
from lorica_coordinator.service.ports import Clock, Keys, RoundStore
from lorica_coordinator.service.records import EnrolledSilo, Invitation
from lorica_coordinator.service.threads import Threads
from lorica_security.errors import AuthenticationError, ConfigurationError
from lorica_security.identifiers import SiloName, silo_name
from lorica_security.identity.enrolment_token import (
    SECRET_BYTES,
    check_unexpired,
    is_secret,
    secret_digest,
    verify_secret,
)

MAX_VALID_SECONDS = 90 * 86_400
MOST_ENDED = 1000
"""Invitations that ended unused, of which it is known how."""
LOOK_S = 60.0
"""Between two looks at the clock, which may be set: whether an invitation is open goes by it."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """What a silo gets for its token."""

    certificate_pem: bytes
    trust_bundle_pem: bytes
    coordinator_identity_key: bytes


class Enrolment:
    def __init__(
        self, *, store: RoundStore, keys: Keys, loop: RoundLoop, register: Register, clock: Clock, threads: Threads
    ) -> None:
        self._store = store
        self._register = register
        self._threads = threads
        self._keys = keys
        self._loop = loop
        self._clock = clock
        self._open: tuple[Invitation, ...] = ()
        self._replaced: dict[tuple[SiloName, bytes], bool] = {}
        """Of invitations that ended unused since this process began, by silo and digest: replaced by a newer one, or
        voided."""
        self._changed = asyncio.Event()
        self.listening = asyncio.Event()
        """Cleared while there is a listener that does not take tokens at the moment."""
        self.listening.set()
        self.on_change: list[Callable[[], None]] = []

    @property
    def keys(self) -> Keys:
        return self._keys

    async def resume(self) -> None:
        """Take up the invitations that are open by the store; those that pin an authority that was retired are void."""
        await self.keep(pins={one.pin for one in self._keys.authorities.standings()})

    async def keep(self, *, pins: Collection[str]) -> None:
        """Open invitations that pin another authority than these are void from now on, whoever brings the token."""
        await self._threads.store(lambda: self._store.void_invitations(pins=pins))
        await self._reload()

    async def invite(self, silo: str, valid_seconds: int) -> tuple[str, float]:
        """A one-time token for `silo` and its expiry, Unix seconds; an older open one for this silo is void from now
        on.

        An enrolled silo may be invited again: its keys are replaced when it accepts. Raises ConfigurationError.
        """
        name = silo_name(silo)
        if not 1 <= valid_seconds <= MAX_VALID_SECONDS:
            raise ConfigurationError(
                f"an invitation valid for {valid_seconds} seconds is not allowed: use 1 to {MAX_VALID_SECONDS}"
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        expires = float(int(self._clock()) + valid_seconds)
        pin = self._keys.pin
        token = self._keys.token(name, secret=secret, expires_unix_s=expires, pin=pin)
        invitation = Invitation(silo=name, secret_digest=secret_digest(secret), expires_unix_s=expires, pin=pin)
        await self._threads.store(self._store.invite, invitation)
        await self._reload()
        _log.info("silo invited", silo=name, expires_unix_s=expires)
        return token, expires

    async def enrol(
        self,
        silo: str,
        *,
        token_secret: bytes,
        csr_der: bytes,
        identity_public_key: bytes,
        identity_endorsement: bytes,
        trust: bytes,
    ) -> Issued:
        """Spend a token on a certificate. `trust`: digest of the bundle that the silo was given and checked, perhaps
        some time ago.

        Raises AuthenticationError for a token that is unknown, spent, replaced or expired, and what `Keys.certify`
        raises for the request; the token is spent only when everything has been checked.
        """
        name = silo_name(silo)
        now = self._clock()
        invitation = self._of(name)
        if invitation is None or not is_secret(token_secret, invitation.secret_digest):
            await self._refuse_spent(name, token_secret)
            self._refuse_ended(name, token_secret)
        if invitation is None:
            raise AuthenticationError(
                f"no invitation is open for silo {name}: this token was replaced by a newer one or voided, or is of "
                f"another coordinator; have a new one made with `coordinator invite {name}`"
            )
        verify_secret(token_secret, invitation.secret_digest)
        check_unexpired(int(invitation.expires_unix_s), silo=name, now=datetime.fromtimestamp(now, UTC))
        certificate = self._keys.certify(
            name,
            csr_der=csr_der,
            identity_public_key=identity_public_key,
            identity_endorsement=identity_endorsement,
            now=now,
        )
        known = await self._threads.store(self._store.silo, name) is not None
        enrolled = EnrolledSilo(
            silo=name,
            identity_public_key=identity_public_key,
            certificate_serial=certificate.entry.serial,
            certificate_digest=certificate.entry.digest,
            certificate_expires_unix_s=certificate.entry.expires_unix_s,
            enrolled_unix_s=now,
            last_seen_unix_s=0.0,
        )
        await self._threads.store(
            lambda: self._store.enrol(
                enrolled,
                secret_digest=invitation.secret_digest,
                authority=certificate.authority,
                trust=trust.hex(),
            )
        )
        await self._register.reload()
        if known:  # whoever held the keys before has open calls, the silo's seat, and a part in the round
            self._register.cut(certificate.entry.identity)
            await self._loop.post(SiloRevoked(now=self._loop.now(), silo=name, reason="enrolled anew with other keys"))
        # Were this lost with the process: the population is taken from the store at the next start.
        await self._loop.post(SiloEnrolled(now=self._loop.now(), silo=name))
        await self._reload()
        _log.info("silo enrolled", silo=name, certificate=certificate.entry.serial)
        return Issued(
            certificate_pem=certificate.pem,
            trust_bundle_pem=self._keys.trust_bundle_pem,
            coordinator_identity_key=self._keys.identity_public_key,
        )

    async def _refuse_spent(self, name: SiloName, token_secret: bytes) -> None:
        """Raise AuthenticationError for a token that was used before: only who holds it is told so."""
        at = await self._threads.store(self._store.spent_at, name, secret_digest(token_secret))
        if at is not None:
            moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
            raise AuthenticationError(
                f"the token of silo {name} was used at {moment}, and a token enrols once: if that was you, silo "
                f"{name} is enrolled in the folder that you used then; if not, tell the operator, who shuts it out "
                f"with `coordinator revoke {name}`; `coordinator invite {name}` makes a new token"
            )

    def _refuse_ended(self, name: SiloName, token_secret: bytes) -> None:
        """Raise AuthenticationError for a token that was replaced or voided: likewise, only who holds it is told
        which."""
        replaced = self._replaced.get((name, secret_digest(token_secret)))
        if replaced is None:
            return
        if replaced:
            raise AuthenticationError(
                f"this token of silo {name} was replaced by a newer one, since silo {name} was invited again: use "
                f"the newest token, or have another one made with `coordinator invite {name}`"
            )
        raise AuthenticationError(
            f"this token of silo {name} was voided: silo {name} was shut out, or the authority that the token pins "
            f"has retired; ask the operator, who makes another one with `coordinator invite {name}`"
        )

    def would_take(self, silo: str, token_secret: bytes) -> bool:
        """Whether this is the secret of an open invitation of that silo; expired ones count."""
        invitation = self._of(silo)
        return invitation is not None and is_secret(token_secret, invitation.secret_digest)

    def _of(self, silo: str) -> Invitation | None:
        """The open one of this silo; it may have expired."""
        return next((item for item in self._open if item.silo == silo), None)

    # --- whether the enrolment listener should be there

    def invited(self) -> tuple[SiloName, ...]:
        """Silos with an open invitation that has not expired."""
        now = self._clock()
        return tuple(item.silo for item in self._open if item.expires_unix_s > now)

    def invitations_open(self) -> bool:
        return bool(self.invited())

    async def until_listening(self, expires_unix_s: float) -> None:
        """Return as soon as a token would be heard, or has expired: the listener of an earlier one may be closing."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, expires_unix_s - self._clock())):
                await self.listening.wait()

    async def until_open(self) -> None:
        """Return as soon as there is an invitation to accept."""
        while not self.invitations_open():
            await self._change_within(LOOK_S)

    async def until_closed(self) -> None:
        """Return as soon as every invitation is spent or expired."""
        while self.invitations_open():
            latest = max(item.expires_unix_s for item in self._open)
            await self._change_within(min(LOOK_S, max(0.0, latest - self._clock())))

    async def _change_within(self, seconds: float) -> None:
        self._changed.clear()
        # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the change.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _reload(self) -> None:
        before, self._open = self._open, await self._threads.store(self._store.invitations)
        invited = {item.silo for item in self._open}
        for ended in set(before).difference(
            self._open
        ):  # one that was used is among them, and known as such from the store
            self._replaced[ended.silo, ended.secret_digest] = ended.silo in invited
        for oldest in list(self._replaced)[:-MOST_ENDED]:
            del self._replaced[oldest]
        self._changed.set()
        for changed in self.on_change:
            changed()
