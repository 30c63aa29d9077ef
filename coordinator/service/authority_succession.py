"""How one authority of the federation follows another while silos stay connected, and what may be done when.

    rotate, adopt    a successor joins the trust bundle; every connected silo hears its new digest and fetches it
    activate         once every silo has it, the successor issues; certificates of the one before are good until they end
    retire           once no silo's certificate and no open invitation depends on it, the one before leaves the bundle

Each step is done by itself when it is due, by command earlier: refused where it would leave silos behind, unless forced. A silo
whose certificate has expired is not waited for: it needs a new invitation whatever happens.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from coordinator.service.ports import AuthorityStanding, Clock, Keys, RoundStore
from coordinator.service.threads import Threads
from security.errors import MalformedMessage, StateError
from security.identifiers import SiloName

ISSUING, SUCCESSOR, TRUSTED = "issuing", "successor", "trusted"
STEPS = ("rotate", "adopt", "activate", "retire")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityRow:
    """`unaware` silos have not fetched a bundle with it, as far as is known; the certificates of `dependent` ones are of it."""

    standing: AuthorityStanding
    unaware: tuple[SiloName, ...]
    dependent: tuple[SiloName, ...]


class AuthoritySteps:
    """`on_change` hears of every step, after it is durable."""

    def __init__(self, *, keys: Keys, store: RoundStore, clock: Clock, threads: Threads) -> None:
        self._keys = keys
        self._store = store
        self._clock = clock
        self._threads = threads
        self._one_at_a_time = asyncio.Lock()
        self.on_change: list[Callable[[], None]] = []

    async def rows(self) -> tuple[AuthorityRow, ...]:
        now, present = self._clock(), self._keys.trust_digest.hex()
        silos = [
            item
            for item in await self._threads.store(self._store.silos)
            if item.certificate_expires_unix_s > now and item.revoked_unix_s is None
        ]
        held = await self._threads.store(self._store.held_trust)
        standings = self._keys.authorities.standings()
        known = {standing.digest for standing in standings}
        unaware = tuple(item.silo for item in silos if item.silo not in held or held[item.silo].trust != present)
        # An unknown issuer may be any of those that are only trusted still.
        issuers = {item.silo: held[item.silo].authority if item.silo in held else "" for item in silos}
        return tuple(
            AuthorityRow(
                standing=standing,
                unaware=unaware,
                dependent=tuple(
                    silo
                    for silo, issuer in issuers.items()
                    if issuer == standing.digest or (issuer not in known and standing.stage == TRUSTED)
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
        """Take every step that is due."""
        async with self._one_at_a_time:
            while step := due_step(await self.rows(), self._clock()):
                await self._take(step, force=False)

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
                f"silos {', '.join(successor.unaware)} do not know authority {successor.standing.name} yet, and could not "
                "connect after this: wait until they have been connected, or leave them behind with --force and invite "
                "them again"
            )
        pinned_until = await self._threads.store(self._latest_invitation)
        await self._threads.store(lambda: self._keys.authorities.activate(pinned_until=pinned_until))

    async def _retire(self, *, force: bool) -> None:
        trusted = [row for row in await self.rows() if row.standing.stage == TRUSTED]
        if not trusted:
            raise StateError("every authority is needed: there is none that issues no more and is trusted still")
        row = trusted[-1]
        if row.dependent and not force:
            raise StateError(
                f"certificates of silos {', '.join(row.dependent)} are of authority {row.standing.name}: wait until they "
                "have renewed them, or leave them behind with --force and invite them again"
            )
        if row.standing.pinned_until_unix_s > self._clock() and not force:
            until = datetime.fromtimestamp(row.standing.pinned_until_unix_s, UTC).isoformat(timespec="minutes")
            raise StateError(
                f"open invitations pin authority {row.standing.name}, until {until} at the latest: wait, or void them with "
                "--force and invite anew"
            )
        await self._threads.store(self._keys.authorities.retire, row.standing.name)

    def _latest_invitation(self) -> float:
        return max((item.expires_unix_s for item in self._store.invitations()), default=0.0)

    def _moment(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)

    def _tell(self, step: str) -> None:
        stages = {standing.name: standing.stage for standing in self._keys.authorities.standings()}
        _log.info("authority changed", step=step, authorities=stages)
        for changed in self.on_change:
            changed()


def due_step(rows: Sequence[AuthorityRow], now: float) -> str:
    """What the coordinator does by itself now: one of STEPS, or nothing ("").

    A successor is made when a third of the issuing authority's life is left.
    """
    issuing = next(row.standing for row in rows if row.standing.stage == ISSUING)
    successor = next((row for row in rows if row.standing.stage == SUCCESSOR), None)
    if successor is not None and not successor.unaware:
        return "activate"
    trusted = [row for row in rows if row.standing.stage == TRUSTED]
    if trusted and not trusted[-1].dependent and trusted[-1].standing.pinned_until_unix_s <= now:
        return "retire"
    left, life = issuing.expires_unix_s - now, issuing.expires_unix_s - issuing.begins_unix_s
    return "rotate" if successor is None and left < life / 3 else ""
