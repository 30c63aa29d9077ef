"""The federation's chain of release groups: what stands, what is proposed to follow, and who has signed it.

The coordinator relays: every silo holds the chain itself and decides what it signs. What stands here is what masked
rounds are opened with. A proposal can be replaced by another one; a silo that signed the first signs no second.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from lorica_coordinator.service.ports import RoundStore
from lorica_coordinator.service.threads import Threads
from lorica_security.errors import AuthorisationError, Conflict, MalformedMessage, StateError, WrongTime
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.secure_aggregation.groups.release_groups import (
    LEAST_PROMISE,
    Link,
    Partition,
    Promise,
    SignedLink,
    check_signature,
    check_successor,
    first_link,
    least_group,
    missing_signatures,
    out_of_reach,
    signers,
    successor,
)
from lorica_security.secure_aggregation.transcript import digest

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsStanding:
    """For people: the link that stands, the one that is proposed to follow, and whose signatures that one waits for."""

    stands: Link | None
    proposed: Link | None
    unsigned: frozenset[SiloName]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierGroups:
    """Release groups that came to stand at this coordinator, by its audit log; `groups` may be cut where they are very
    many."""

    number: int
    digest: str
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """A link that silo `by` holds and that cannot be taken back, and `why`; whether it `follows` what stands here."""

    by: SiloName
    link: Link
    why: str
    follows: bool


class ReleaseGroups:
    """`await load()` once. `on_change` are told when a link or a signature came, `on_standing` before a link is kept
    that has what it needs."""

    def __init__(self, *, federation: FederationName, store: RoundStore, threads: Threads) -> None:
        self._federation = federation
        self._store = store
        self._threads = threads
        self._chain: tuple[SignedLink, ...] = ()
        self._proposed: SignedLink | None = None
        self._word = b""
        self._news = asyncio.Event()
        self._alone = asyncio.Lock()
        self.stood: EarlierGroups | None = None
        """The newest that stood here before this coordinator began, where somebody knows."""
        self._held: _Held | None = None
        self._digest: tuple[tuple[object, ...], bytes] = ((), b"")
        self.on_change: list[Callable[[], None]] = []
        self.on_standing: list[Callable[[SignedLink], None]] = []

    async def load(self) -> None:
        self._chain, self._proposed = await self._threads.store(self._store.release_groups)

    @property
    def standing(self) -> SignedLink | None:
        """The newest link that has the signatures that it needs."""
        return self._chain[-1] if self._chain else None

    @property
    def head(self) -> Link | None:
        return None if self.standing is None else self.standing.link

    @property
    def proposed(self) -> SignedLink | None:
        return self._proposed

    @property
    def foreseen(self) -> Partition | None:
        """What the next masked sum is over: the groups that stand, or while none do the first ones that are
        proposed."""
        if self.head is not None:
            return self.head.partition
        return None if self._proposed is None else self._proposed.link.partition

    @property
    def digest(self) -> bytes:
        """Of everything that a silo may want to fetch; computed anew only where that was replaced, since each order of
        each silo asks for it."""
        source = self._chain, self._proposed, self._word
        known = self._digest[0]
        if len(known) != len(source) or any(old is not new for old, new in zip(known, source, strict=True)):
            parts = [(one.link.digest, *(signature for _, signature in one.signatures)) for one in self._all]
            self._digest = source, digest("release-groups-standing", len(self._chain), parts, self._word)
        return self._digest[1]

    @property
    def _all(self) -> tuple[SignedLink, ...]:
        return self._chain if self._proposed is None else (*self._chain, self._proposed)

    def after(self, number: int) -> tuple[SignedLink, ...]:
        """The links from `number` on."""
        return tuple(one for one in self._chain if one.link.number >= number)

    def waits_for(self) -> tuple[frozenset[SiloName], int]:
        """Of whom the proposal wants signatures, and how many; nobody where nothing is proposed."""
        if self._proposed is None:
            return frozenset(), 0
        return missing_signatures(self.head, self._proposed.link, [silo for silo, _ in self._proposed.signatures])

    def as_it_stands(self) -> GroupsStanding:
        unsigned, _ = self.waits_for()
        proposed = None if self._proposed is None else self._proposed.link
        return GroupsStanding(stands=self.head, proposed=proposed, unsigned=unsigned)

    def behind(self, connected: Collection[SiloName]) -> str | None:
        """What silos have that is newer than what stands here, of whom it is waited for and what can be done; None:
        nothing is known."""
        number = 0 if self.head is None else self.head.number
        here = f"release groups {number} stand" if number else "none stand"
        if (held := self._held) is not None and held.link.number > number:
            groups = " ".join(",".join(group) for group in held.link.partition.groups)
            promise = held.link.promise
            remedy = (
                f"`coordinator groups propose {groups} --colluders {promise.colluders} --smallest-group "
                f"{promise.smallest_group}`"
                if held.follows
                else "restore a newer backup: groups that others have followed are not signed again"
            )
            return (
                f"silo {held.by} holds release groups {held.link.number}, here {here}, and they are not taken back: "
                f"{held.why}; {remedy}"
            )
        if self.stood is None or self.stood.number <= number:
            return None
        stood = (
            f"release groups {self.stood.number} ({self.stood.digest[:16]}) stood before this coordinator was "
            f"restored, here {here}"
        )
        away = sorted({silo for group in self.stood.groups for silo in group} - set(connected))
        whom = f"waiting for {', '.join(away)}" if away else "those that are connected have none of them"
        remedy = (
            "where nobody has them any more, `coordinator groups propose "
            f"{' '.join(','.join(group) for group in self.stood.groups)}`"
            if self.stood.number == number + 1
            else "where nobody has them any more, restore a newer backup"
        )
        return f"{stood}: a silo that holds them gives them back when it connects; {whom}; {remedy}"

    def require_head(self, *, colluders: int = 0) -> Link:
        """Raises StateError where masked rounds cannot begin: no groups stand, or they hold against fewer colluders
        than the plan."""
        if (head := self.head) is not None:
            if head.promise.colluders < colluders:
                raise StateError(
                    f"the plan is to hold against {colluders} colluders, release groups {head.number} hold against "
                    f"{head.promise.colluders}: `coordinator groups propose` with --colluders {colluders}"
                )
            return head
        if self.behind(()) is not None:
            raise StateError("release groups that stood before are to come back from the silos first")
        if self._proposed is None:
            raise StateError("no release groups stand: `coordinator groups propose` says who is summed with whom")
        silos, _ = self.waits_for()
        raise StateError(
            f"release groups {self._proposed.link.digest.hex()[:16]} wait for the signatures of "
            f"{', '.join(sorted(silos))}: their people look with `silo-agent groups show`"
        )

    async def propose(
        self,
        groups: Iterable[Iterable[SiloName]],
        *,
        colluders: int | None = None,
        smallest_group: int | None = None,
    ) -> SignedLink:
        """In the place of what is proposed; None: as the groups that stand promise, or what `colluders` ask for.

        A `smallest_group` of 1 or 2, which no link can promise, lets groups be as small and leaves the promise as
        without it. Raises MalformedMessage for groups or numbers that are none, StateError for a silo that is not
        enrolled, for a promise that nothing could follow, and for a group of fewer silos than is promised.
        """
        partition = Partition.of(groups)
        async with self._alone:
            before = LEAST_PROMISE if self.head is None else self.head.promise
            against = before.colluders if colluders is None else colluders
            least = max(before.smallest_group, least_group(against))
            if smallest_group is not None and smallest_group >= LEAST_PROMISE.smallest_group:
                least = smallest_group
            promise = Promise(colluders=against, smallest_group=least)
            return await self._propose(partition, promise, least=least if smallest_group is None else smallest_group)

    async def _propose(self, partition: Partition, promise: Promise, *, least: int = 0) -> SignedLink:
        """`least` is how many silos each group has to have."""
        enrolled = {item.silo for item in await self._threads.store(self._store.silos)}
        if strangers := sorted(partition.members - enrolled):
            raise StateError(f"release groups name {', '.join(strangers)}, who are not enrolled: coordinator status")
        head = self.head
        link = first_link(self._federation, partition, promise) if head is None else successor(head, partition, promise)
        if head is not None and (link.partition, link.promise) == (head.partition, head.promise):
            raise Conflict(f"release groups {head.number} are these groups already: nothing was changed")
        if reason := out_of_reach(link):
            raise StateError(f"{reason}: nothing was proposed")
        _require_large_enough(partition, promise, least)
        if self._proposed is not None and self._proposed.link == link:
            return self._proposed
        await self._keep(SignedLink(link=link))
        _log.info("release groups proposed", number=link.number, groups=len(partition.groups), silos=len(link.members))
        return SignedLink(link=link)

    async def propose_first(self, groups: Iterable[Iterable[SiloName]], *, colluders: int) -> None:
        """As large as can be: one of all silos, or of each kind of which rounds are. Where nothing stands, nothing is
        proposed and nothing is to come back; `colluders` are the plan's."""
        async with self._alone:
            if self.head is None and self._proposed is None and self.behind(()) is None:
                promise = Promise(colluders=colluders, smallest_group=least_group(colluders))
                await self._propose(Partition.of(groups), promise)

    async def sign(self, silo: SiloName, link: bytes, signature: bytes) -> None:
        """Raises WrongTime for a link that is not here, AuthorisationError for who has no say in it, IntegrityError for
        a false signature."""
        async with self._alone:
            await self._sign(silo, link, signature)

    async def _sign(self, silo: SiloName, link: bytes, signature: bytes) -> None:
        signed = next((one for one in self._all if one.link.digest == link), None)
        if signed is None:
            raise WrongTime(f"release groups {link.hex()[:16]} are not proposed any more: fetch them again")
        before = next((one.link for one in self._chain if one.link.digest == signed.link.previous), None)
        if silo not in signed.link.members | (frozenset() if before is None else before.members):
            raise AuthorisationError(f"silo {silo} is in none of release groups {link.hex()[:16]}: it signs nothing")
        if dict(signed.signatures).get(silo) == signature:
            return
        enrolled = await self._threads.store(self._store.silo, silo)
        if enrolled is None:
            raise AuthorisationError(f"silo {silo} is not enrolled in this federation")
        check_signature(signed.link, silo, signature, public_key_from_bytes(enrolled.identity_public_key))
        after = signed.signed_by(silo, signature)
        if self._proposed is None or signed.link != self._proposed.link:
            await self._threads.store(self._store.keep_release_groups, after, stands=True)
            self._chain = tuple(after if one.link == after.link else one for one in self._chain)
            self._tell()
            return
        await self._keep(after)

    async def begin_with(self, link: bytes) -> None:
        """The operator's word, until this process ends, that a chain may begin that leads to `link`; silos give theirs
        again.

        Raises StateError where release groups stand.
        """
        async with self._alone:
            if self.head is not None:
                raise StateError(
                    f"release groups {self.head.number} stand ({self.head.digest.hex()[:16]}): what follows them is "
                    "taken back from silos by itself, and nothing in their place"
                )
            self._word = link
            _log.info("release groups to be taken back", digest=link.hex())
            self._tell()

    async def take_back(self, silo: SiloName, links: Iterable[SignedLink]) -> None:
        """The links after the head, from a silo that holds them: this coordinator came from a backup of before they
        stood.

        Each has to follow, with the signatures that it needs, under the keys that silos had or have here. The first
        that does not, and those after it, are left: the silo is answered with what stands, and says what its operator
        can do. Where nothing stands, the operator has to have named a link that they lead to: any silo could sign first
        ones of itself alone. A member that is not enrolled here is no hindrance in a later link: it may have come after
        the backup, and enough of those before signed for it.
        """
        async with self._alone:
            given = tuple(links)
            if given and self.head is None and not self._may_begin(given):
                _log.warning(
                    "release groups not taken back",
                    silo=silo,
                    digest=given[-1].link.digest.hex(),
                    detail="none stand here, and the operator named none that these lead to: coordinator groups "
                    "take-back",
                )
                return
            for signed in given:
                link = signed.link
                if self.head is not None and link.number <= self.head.number:
                    continue
                try:
                    check_successor(self.head, link)
                except MalformedMessage as error:
                    self._hold(_Held(by=silo, link=link, why=str(error), follows=False))
                    return
                if reason := out_of_reach(link):
                    _log.warning("release groups not taken back", silo=silo, detail=reason)
                    return
                good = await self._good(signed)
                missing, needed = missing_signatures(self.head, link, [name for name, _ in good.signatures])
                if needed:
                    unsigned = ", ".join(sorted(missing))
                    why = f"no good signature is with them of {unsigned}"
                    self._hold(_Held(by=silo, link=link, why=why, follows=True))
                    return
                self._word = b""
                await self._keep(good)
                _log.info("release groups taken back", silo=silo, number=link.number)

    def _hold(self, held: _Held) -> None:
        if held != self._held:
            _log.warning("release groups not taken back", silo=held.by, number=held.link.number, detail=held.why)
            self._held = held
            for told in self.on_change:
                told()

    def _may_begin(self, given: Iterable[SignedLink]) -> bool:
        """Whether the operator named one of these links, or the log of this coordinator does, and those before it lead
        to it from the first."""
        named = {self._word} if self.stood is None else {self._word, bytes.fromhex(self.stood.digest)}
        before: Link | None = None
        for signed in given:
            try:
                check_successor(before, signed.link)
            except MalformedMessage:
                return False
            if signed.link.digest in named:
                return True
            before = signed.link
        return False

    async def _good(self, signed: SignedLink) -> SignedLink:
        """With the signatures alone that a key of who signs it made, the present one or one that led to it."""
        voters = signed.link.members | (frozenset() if self.head is None else self.head.members)
        good = []
        for silo, signature in signed.signatures:
            if silo not in voters:
                continue
            enrolled = await self._threads.store(self._store.silo, silo)
            if enrolled is None:
                continue
            successions = await self._threads.store(self._store.successions, silo)
            keys = (public_key_from_bytes(enrolled.identity_public_key), *(one.predecessor for one in successions))
            if any(signers(signed, {silo: key}) for key in keys):
                good.append((silo, signature))
        return SignedLink(link=signed.link, signatures=tuple(good))

    async def _keep(self, signed: SignedLink) -> None:
        """As proposed, or standing once it has the signatures that it needs."""
        link = signed.link
        _, missing = missing_signatures(self.head, link, [silo for silo, _ in signed.signatures])
        if not missing:
            for told in self.on_standing:
                told(signed)
        await self._threads.store(self._store.keep_release_groups, signed, stands=not missing)
        if missing:
            self._proposed = signed
        else:
            self._chain, self._proposed = (*self._chain, signed), None
            _log.info("release groups stand", number=link.number, groups=len(link.partition.groups))
        self._tell()

    async def changed(self, *, within_s: float) -> None:
        """Until a link or a signature has come, or the seconds are over."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        for told in self.on_change:
            told()


def _require_large_enough(partition: Partition, promise: Promise, allowed: int) -> None:
    for group in partition.groups:
        if len(group) < allowed:
            raise StateError(
                f"release group {','.join(group)} has {len(group)} silos, and the smallest group that is promised is "
                f"{promise.smallest_group}: put these silos into a larger group, or say with --smallest-group "
                f"{len(group)} that it is to be so small"
            )
