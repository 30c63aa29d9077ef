"""How one authority of the federation follows another while silos stay connected, and what may be done when.

    rotate, adopt    a successor joins the trust bundle; every connected silo hears its new digest and fetches it
    activate         once everybody has it, the successor issues; certificates of the one before are good until they end
    retire           once nobody's certificate and no open invitation depends on it, the one before leaves the bundle

Everybody: each silo, and each operator and viewer on another host. They have what they have called with
(held_trust.py), not what was sent to them. Each step is done by itself when it is due, by command earlier: refused
where it would leave somebody behind, unless forced. Whoever's certificate has expired, or was revoked, is not waited
for: a silo like that needs a new invitation, an operator another grant, whatever happens.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from lorica_coordinator.service.issued import AuthorityStanding
from lorica_coordinator.service.members.enrolment import Enrolment
from lorica_coordinator.service.members.held_trust import HeldTrusts
from lorica_coordinator.service.members.register import Register
from lorica_coordinator.service.ports import Clock, Keys, RoundStore
from lorica_coordinator.service.threads import Threads
from lorica_security.errors import MalformedMessage, StateError
from lorica_security.identifiers import Identity, Role, SiloName

ISSUING, SUCCESSOR, TRUSTED = "issuing", "successor", "trusted"
STEPS = ("rotate", "adopt", "activate", "retire")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityRow:
    """`unaware`: who does not hold a bundle with it, as far as is known; `dependent`: whose certificates are of it.

    `pinned_until_unix_s`: when the last open invitation ends that pins it, 0 for none.
    """

    standing: AuthorityStanding
    unaware: tuple[Identity, ...]
    dependent: tuple[Identity, ...]
    pinned_until_unix_s: float = 0.0


class AuthoritySteps:
    """`on_change` hears of every step, after it is durable."""

    def __init__(
        self,
        *,
        keys: Keys,
        store: RoundStore,
        register: Register,
        held: HeldTrusts,
        enrolment: Enrolment,
        clock: Clock,
        threads: Threads,
    ) -> None:
        self._keys = keys
        self._store = store
        self._register = register
        self._held = held
        self._enrolment = enrolment
        self._clock = clock
        self._threads = threads
        self._one_at_a_time = asyncio.Lock()
        self.on_change: list[Callable[[], None]] = []

    async def rows(self, now: float | None = None) -> tuple[AuthorityRow, ...]:
        """As they stand by the clock, or at `now`."""
        now, present = self._clock() if now is None else now, self._keys.trust_digest.hex()
        held = {who: trust for who, trust in (await self._held.known()).items() if self._register.lets_in(who, now)}
        invitations = await self._threads.store(self._store.invitations)
        standings = self._keys.authorities.standings()
        known = {standing.digest for standing in standings}
        everybody = sorted(held, key=lambda who: (who.role is not Role.SILO, who.uri))
        return tuple(
            AuthorityRow(
                standing=standing,
                unaware=tuple(who for who in everybody if held[who].trust != present),
                dependent=tuple(
                    who
                    for who in everybody
                    if held[who].authority == standing.digest
                    # An issuer that is not known may be any of those that are only trusted still.
                    or (held[who].authority not in known and standing.stage == TRUSTED)
                ),
                pinned_until_unix_s=max(
                    (one.expires_unix_s for one in invitations if one.pin == standing.pin), default=0.0
                ),
            )
            for standing in standings
        )

    async def silo_expiries(self) -> Mapping[SiloName, float]:
        """When each silo's newest certificate expires, Unix seconds."""
        silos = await self._threads.store(self._store.silos)
        return {item.silo: item.certificate_expires_unix_s for item in silos if item.revoked_unix_s is None}

    async def take(self, step: str, *, force: bool, certificate_pem: bytes = b"", chain_pem: bytes = b"") -> None:
        """One of STEPS, at the operator's word. Raises StateError where it does not fit or would leave silos behind."""
        async with self._one_at_a_time:
            await self._take(step, force=force, certificate_pem=certificate_pem, chain_pem=chain_pem)

    async def advance(self) -> None:
        """Take every step that is due; none while this clock says that every silo's certificate is out of date.

        It is the clock that is wrong then, or there is nobody left to lead from one authority to the next. By a clock
        that is years ahead there would be nobody to wait for: authorities would follow each other at once, and shut out
        every silo for good.
        """
        async with self._one_at_a_time:
            while step := await self._due(self._clock()):
                await self._take(step, force=False)

    async def _due(self, now: float) -> str:
        return due_step(await self.rows(now), now) if await self._lets_silos_in(now) else ""

    async def _lets_silos_in(self, now: float) -> bool:
        known = await self._held.known()  # also of those that were revoked, whom no date lets in
        silos = [who for who in known if who.role is Role.SILO and self._register.lets_in(who, 0.0)]
        return not silos or any(self._register.lets_in(who, now) for who in silos)

    async def _take(self, step: str, *, force: bool, certificate_pem: bytes = b"", chain_pem: bytes = b"") -> None:
        match step:
            case "rotate":
                await self._threads.store(self._keys.authorities.rotate, self._moment())
            case "adopt":
                await self._threads.store(self._keys.authorities.adopt, certificate_pem, chain_pem, self._moment())
            case "activate":
                await self._activate(force=force)
            case "retire":
                await self._retire(force=force)
            case _:
                raise MalformedMessage(f"step {step[:40]!r} of an authority: send one of {', '.join(STEPS)}")
        self._tell(step)

    async def _activate(self, *, force: bool) -> None:
        rows = await self.rows()
        successor = next((row for row in rows if row.standing.stage == SUCCESSOR), None)
        if successor is not None and successor.unaware and not force:
            raise StateError(
                f"authority {successor.standing.name} is not known to {named(successor.unaware)} yet, who could not "
                "connect after this: wait until silos have been connected and the others have run `coordinator access "
                "renew`, or leave them behind with --force, and invite or grant anew"
            )
        await self._threads.store(self._keys.authorities.activate)

    async def _retire(self, *, force: bool) -> None:
        trusted = [row for row in await self.rows() if row.standing.stage == TRUSTED]
        if not trusted:
            raise StateError("every authority is needed: there is none that issues no more and is trusted still")
        row = trusted[-1]
        if row.dependent and not force:
            raise StateError(
                f"authority {row.standing.name} is needed by the certificates of {named(row.dependent)}: wait until "
                "they have renewed them, or leave them behind with --force, and invite or grant anew"
            )
        if row.pinned_until_unix_s > self._clock() and not force:
            until = datetime.fromtimestamp(row.pinned_until_unix_s, UTC).isoformat(timespec="minutes")
            raise StateError(
                f"open invitations pin authority {row.standing.name}, until {until} at the latest: wait, or void "
                "them with --force and invite anew"
            )
        name = row.standing.name
        kept = {one.pin for one in self._keys.authorities.standings() if one.name != name}
        await self._enrolment.keep(pins=kept)  # first: no token of it is taken when it is gone
        await self._threads.store(self._keys.authorities.retire, name, self._moment())

    def _moment(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)

    def _tell(self, step: str) -> None:
        stages = {standing.name: standing.stage for standing in self._keys.authorities.standings()}
        _log.info("authority changed", step=step, authorities=stages)
        for changed in self.on_change:
            changed()


def label(who: Identity) -> str:
    """How rows call somebody: silos by name alone."""
    return who.name if who.role is Role.SILO else f"{who.role.value} {who.name}"


def named(everybody: Sequence[Identity]) -> str:
    """silos bank-b, hospital-a, operator anna."""
    labels = ", ".join(map(label, everybody))
    return f"silos {labels}" if everybody[0].role is Role.SILO else labels


def due_step(rows: Sequence[AuthorityRow], now: float) -> str:
    """What the coordinator does by itself now: one of STEPS, or nothing ("").

    A successor is made when a third of the issuing authority's life is left.
    """
    issuing = next(row.standing for row in rows if row.standing.stage == ISSUING)
    successor = next((row for row in rows if row.standing.stage == SUCCESSOR), None)
    if successor is not None and not successor.unaware:
        return "activate"
    trusted = [row for row in rows if row.standing.stage == TRUSTED]
    if trusted and not trusted[-1].dependent and trusted[-1].pinned_until_unix_s <= now:
        return "retire"
    left, life = issuing.expires_unix_s - now, issuing.expires_unix_s - issuing.begins_unix_s
    return "rotate" if successor is None and left < life / 3 else ""
