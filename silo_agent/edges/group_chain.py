"""The release groups that this silo holds, in `release-groups.json` of its folder: the newest link, what it signed, what people approved.

Rules that hold whatever the coordinator offers:

- a link is taken only after the one that this silo holds, with the signatures that it needs, under the keys that are pinned here, and
  under earlier ones where enough others went on from it (`group_return.stand_by`);
- one successor of a link is signed, and that is on disk before the signature leaves; people alone take a signature back;
- a link that promises less than this silo's policy asks for, or so much that nothing could follow it, is refused, whoever signed it;
- what `group_changes.objection` finds is for this silo's people: until they approve, the link is neither signed nor taken.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal, Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import AwareDatetime, Field

from security.errors import ConfigurationError, MalformedMessage, PolicyRefusal, StateError
from security.files import is_there
from security.identifiers import FederationName, SiloName
from security.pki.seal import Seal
from security.secure_aggregation.group_changes import judged_by, objection
from security.secure_aggregation.release_groups import (
    MAX_LINKS,
    NO_LINK,
    RELEASE_GROUPS,
    Group,
    Link,
    Promise,
    SignedLink,
    check_successor,
    missing_signatures,
    out_of_reach,
    signers,
    too_little,
)
from silo_agent.edges.counted_record import CountedContent, CountedRecord, Notes, require_plausible
from silo_agent.edges.group_return import EarlierKeys, is_of_another_key, lacks, stand_by, to_compare
from silo_agent.edges.private_record import RESET, PrivateRecord
from silo_wire.groups_codec import MOST_SILOS, GroupsOffer, signed_groups_from_bytes, signed_groups_to_bytes
from silo_wire.strict_toml import NameText

_REMEDY = (
    f"restore it from a backup of today, or have this silo's people decide with `{RESET}`; nothing is masked without it"
)
MOST_EARLIER = 256 << 10
"""Characters of the links before the newest one: a coordinator that came from a backup is given them back."""
DigestText = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
LinkNumber = Annotated[int, Field(ge=0, lt=MAX_LINKS)]
ApprovedSets = Annotated[list[list[NameText]], Field(max_length=MOST_SILOS)]


class _Chain(CountedContent):
    version: Literal[1] = 1
    lost: LinkNumber = 0  # people went on though links up to this number were lost: none before it is held
    federation: str = ""
    held: str = ""  # the newest link, as it travels, in base64
    earlier: list[str] = Field(default_factory=list)  # the links before it, oldest first, as far as there is room
    proposed: str = ""  # what is to follow it, as it was offered last
    signed: dict[DigestText, DigestText] = Field(default_factory=dict)  # predecessor: the one successor
    approved: dict[DigestText, AwareDatetime] = Field(default_factory=dict)
    approved_atoms: ApprovedSets = Field(default_factory=list)
    approved_groups: ApprovedSets = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedLink:
    """A link, and whose signatures under it this silo finds good, cannot check for want of a pinned key, and finds false."""

    link: Link
    good: tuple[SiloName, ...]
    unchecked: tuple[SiloName, ...]
    false: tuple[SiloName, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsNote:
    """What stands elsewhere of a chain: how often its file changed, the number of the link that was held, and what was signed last."""

    changes: int = 0
    number: int = 0
    signed: Mapping[str, str] = field(default_factory=dict)


class GroupsKeeper(Protocol):
    """Keeps that note, and finds out by it that the file was lost or put back."""

    def check_groups(self, changes: int) -> None:
        """Raise PolicyRefusal unless a file of so many changes is the newest that there was."""

    def note_groups(self, note: GroupsNote) -> None:
        """Durable when it returns. Raises PolicyRefusal where this silo's memory of masked rounds is not whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """`objection` is why people must decide about `proposed`; None: nobody has to, or they have.

    `unapproved` are the small sets of `held` that keep this silo from masking until its people approve them.
    """

    held: CheckedLink | None
    proposed: CheckedLink | None
    objection: str | None
    unapproved: tuple[Group, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What came of an offer: links that this silo holds now and did not before, what it has to sign, what waits for its people.

    `refused`: why what is proposed is refused, and is not for people to allow.
    """

    links: tuple[Link, ...] = ()
    to_sign: tuple[Link, ...] = ()
    waits: str | None = None
    refused: str | None = None


class GroupChain:
    """Each call reads the file. `pinned` gives the peers whose keys count, as of now, `earlier` the keys that they and this silo had before.

    Raises ConfigurationError naming the file when it is damaged, edited, or when others can read it, PolicyRefusal where `keeper`
    knows of a newer one, StorageError.
    """

    def __init__(
        self,
        path: Path,
        *,
        federation: FederationName,
        silo: SiloName,
        own_key: Ed25519PublicKey,
        pinned: Callable[[], Mapping[SiloName, Ed25519PublicKey]],
        smallest_group: int,
        colluders: int,
        seal: Seal,
        keeper: GroupsKeeper | None = None,
        earlier: Callable[[], EarlierKeys] = dict,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._federation = federation
        self._silo = silo
        self._own_key = own_key
        self._pinned = pinned
        self._earlier = earlier
        self._asks = Promise(colluders=colluders, smallest_group=smallest_group)
        self._now = now
        notes: Notes[_Chain] | None = None
        if keeper is not None:
            notes = Notes(check=keeper.check_groups, note=lambda content: keeper.note_groups(_note(content)))
        self._record = CountedRecord(path, _Chain, check=self._check, remedy=_REMEDY, seal=seal, notes=notes)

    @property
    def head(self) -> Link | None:
        content = self._record.read()
        held = self._link(content.held)
        return None if held is None or held.link.number < content.lost else held.link

    def kept(self) -> tuple[SignedLink, ...]:
        """The links that this silo can show, each after the one before, the newest last."""
        content = self._record.read()
        links: list[SignedLink] = []
        for text in (*content.earlier, content.held):
            if (link := self._link(text)) is not None:
                links.append(link)
        return tuple(links)

    @property
    def is_new(self) -> bool:
        """Whether this silo never held release groups."""
        content = self._record.read()
        return not content.held and not content.lost

    @property
    def approved_atoms(self) -> frozenset[Group]:
        """Small sets that people allowed to be told apart. A release group of such a set is not allowed by that."""
        return _sets(self._record.read().approved_atoms)

    @property
    def approved_groups(self) -> frozenset[Group]:
        """Small release groups that people allowed."""
        return _sets(self._record.read().approved_groups)

    def standing(self) -> Standing:
        content = self._record.read()
        held, proposed = self._link(content.held), self._link(content.proposed)
        reason = None
        if proposed is not None and proposed.link.digest.hex() not in content.approved:
            reason = self._told(None if held is None else held.link, proposed)
        return Standing(
            held=self._checked(held),
            proposed=self._checked(proposed),
            objection=reason,
            unapproved=() if held is None else self._unapproved(content, held.link),
        )

    def take(self, offer: GroupsOffer) -> Taken:
        """Take the links that follow, and keep what is proposed; what is to be signed is on disk as signed when this returns.

        Raises PolicyRefusal for links that do not follow from what this silo holds, or lack signatures; nothing of them is kept.
        """
        taken = Taken()
        if not offer.links and offer.proposed is None and self.is_new:
            return taken  # where nobody masks, a silo has no file that says that it may have

        def edit(content: _Chain) -> _Chain:
            nonlocal taken
            content, new, waits = self._followed(content, offer)
            content, proposed_waits, refused = self._noted(content, offer)
            content, to_sign = self._signed(content, offer)
            taken = Taken(links=new, to_sign=to_sign, waits=waits or proposed_waits, refused=refused)
            return content.model_copy(update={"federation": self._federation})

        self._record.change(edit)
        return taken

    def approve(self, digest: str) -> tuple[Link, str]:
        """People allow what is proposed, or what is held; the link, and what they were told. Raises StateError for any other.

        What is held waits for them again where policy asks for more than when it was taken, or what they had approved was dropped.
        """
        told: tuple[Link, str] | None = None

        def edit(content: _Chain) -> _Chain:
            nonlocal told
            proposed, held = self._link(content.proposed), self._link(content.held)
            signed = next((one for one in (proposed, held) if one and one.link.digest.hex() == digest), None)
            if signed is None:
                raise StateError(
                    f"no release groups {digest} are proposed or held: `silo-agent groups show` has what is, with its digest"
                )
            link = signed.link
            head = None if held is None or signed is held else held.link
            if signed is proposed and (refused := self._refused(head, link)):
                raise PolicyRefusal(RELEASE_GROUPS, refused)
            reason = self._told(head, signed)
            told = link, reason or "nothing that could not be learnt before"
            return content.model_copy(
                update={
                    "approved": {**content.approved, digest: self._now()},
                    "approved_atoms": self._with_small(content.approved_atoms, link, link.atoms),
                    "approved_groups": self._with_small(content.approved_groups, link, link.partition.groups),
                }
            )

        self._record.change(edit)
        assert told is not None, "edit was run"
        return told

    def withdraw(self, digest: str) -> int | None:
        """People take a signature back, so that another successor may be signed: towards the others this silo then counts as a colluder.

        The number of the link, which need not be proposed any more; None where nothing here tells. Raises StateError for one that
        stands, or that this silo did not sign to follow what it holds.
        """
        number: int | None = None

        def edit(content: _Chain) -> _Chain:
            nonlocal number
            held, proposed = self._link(content.held), self._link(content.proposed)
            # Where nothing is held, as after a loss, people alone know that it does not stand.
            of = set(content.signed) if held is None else {held.link.digest.hex()}
            taken_back = {before for before in of if content.signed.get(before) == digest}
            if not taken_back:
                raise StateError(
                    f"release groups {digest} stand here already, or were not signed to follow what this silo holds: "
                    "`silo-agent groups show`"
                )
            if held is not None:
                number = held.link.number + 1
            elif NO_LINK.hex() in taken_back:
                number = 1
            elif proposed is not None and proposed.link.digest.hex() == digest:
                number = proposed.link.number
            kept = {before: after for before, after in content.signed.items() if before not in taken_back}
            approved = {one: when for one, when in content.approved.items() if one != digest}
            return content.model_copy(update={"signed": kept, "approved": approved})

        self._record.change(edit)
        return number

    # ---- what every link is held to --------------------------------------------------------------------------------

    def _followed(self, content: _Chain, offer: GroupsOffer) -> tuple[_Chain, tuple[Link, ...], str | None]:
        """After the links that stand, as far as they may be taken."""
        held = self._link(content.held)
        if held is None and any(map(self._is_of_another_key, offer.links)):
            if not content.signed:
                return self._come_back(content, offer)
            _check_on_the_way(content, offer)
        head = None if held is None else held.link
        before: Link | None = None  # of the link that is looked at
        new: list[Link] = []
        for signed in offer.links:
            link = signed.link
            if head is not None and link.number <= head.number:
                if link.number == head.number and link != head:
                    raise PolicyRefusal(
                        RELEASE_GROUPS,
                        f"release groups {link.number} are {link.digest.hex()[:16]} at the coordinator, this silo holds "
                        f"{head.digest.hex()[:16]}: somebody signed two; ask the other silos' people which they hold",
                    )
                before = link
                continue
            if head is None and link.number == 1:
                before = None
            self._check_follows(head if head is not None else before, link)
            after = head if head is not None else before
            if head is None and self._silo not in link.members:
                before = link  # from before this silo came: nothing was summed with it
                continue
            self._check_signed(content, after, signed, offer)
            if reason := self._refused(head, link):
                raise PolicyRefusal(RELEASE_GROUPS, reason)
            if reason := self._objection(content, head, signed):
                return content.model_copy(update={"proposed": _text(signed)}), tuple(new), reason
            head = before = link
            new.append(link)
            content = _holding(content, after, signed)
        return content, tuple(new), None

    def _come_back(self, content: _Chain, offer: GroupsOffer) -> tuple[_Chain, tuple[Link, ...], str | None]:
        """For a silo whose name signed with a key that it does not have: it lost its folder, and enrolled again.

        It cannot check its own earlier signature, nor those of silos that left. People find out which link stands: the one whose digest
        they approved is taken, where all whose keys are pinned signed as they must, and then what follows that one.
        """
        before: Link | None = None
        for signed in offer.links:
            self._check_follows(None if signed.link.number == 1 else before, signed.link)
            before = signed.link
        chosen = [one for one in offer.links if one.link.digest.hex() in content.approved]
        newest = chosen[-1] if chosen else offer.links[-1]
        link = newest.link
        if self._silo not in link.members:
            return content, (), None  # the others went on without it
        previous = next((one.link for one in offer.links if one.link.digest == link.previous), None)
        if reason := lacks(previous, newest, self._silo, self._pinned()):
            raise PolicyRefusal(RELEASE_GROUPS, reason)
        if reason := self._refused(None, link):
            raise PolicyRefusal(RELEASE_GROUPS, reason)
        if not chosen:
            return content.model_copy(update={"proposed": _text(newest)}), (), self._objection(content, None, newest)
        content, new, waits = self._followed(_holding(content, previous, newest), offer)
        return content, (link, *new), waits

    def _check_follows(self, previous: Link | None, link: Link) -> None:
        try:
            check_successor(previous, link)
        except MalformedMessage as error:
            raise PolicyRefusal(RELEASE_GROUPS, str(error)) from error

    def _check_signed(self, content: _Chain, previous: Link | None, signed: SignedLink, offer: GroupsOffer) -> None:
        keys = self._keys()
        who = signers(signed, keys)
        silos, needed = missing_signatures(previous, signed.link, who)
        if needed:
            earlier, colluders = self._earlier(), self._asks.colluders
            who |= stand_by(
                previous, signed, offer.links, self._silo, pinned=keys, earlier=earlier, colluders=colluders
            )
            if content.signed.get(signed.link.previous.hex()) == signed.link.digest.hex():
                who |= {self._silo for key in earlier.get(self._silo, ()) if signers(signed, {self._silo: key})}
            silos, needed = missing_signatures(previous, signed.link, who)
        if needed:
            raise PolicyRefusal(
                RELEASE_GROUPS,
                f"release groups {signed.link.number} ({signed.link.digest.hex()[:16]}) lack {needed} signatures that this silo can "
                f"check, of {', '.join(sorted(silos))}",
            )

    def _noted(self, content: _Chain, offer: GroupsOffer) -> tuple[_Chain, str | None, str | None]:
        """What is proposed, kept for people to look at, where it follows what this silo holds; why it waits, or is refused."""
        if offer.proposed is None:
            return content, None, None
        held = self._link(content.held)
        link = offer.proposed.link
        head = None if held is None else held.link
        if link.previous != (NO_LINK if head is None else head.digest):
            return content, None, None  # of a chain that this silo is not so far in
        self._check_follows(head, link)
        if reason := self._refused(head, link):
            return content, None, reason
        content = content.model_copy(update={"proposed": _text(offer.proposed)})
        return content, self._objection(content, head, offer.proposed), None

    def _refused(self, head: Link | None, link: Link) -> str | None:
        """Why this silo has no part in a link that promises what nothing could follow, or less than its policy asks for.

        None: it has, or what the link promises is no concern of it.
        """
        concerned = self._silo in link.members or (head is not None and self._silo in head.members)
        return out_of_reach(link) or (too_little(link, self._asks) if concerned else None)

    def _signed(self, content: _Chain, offer: GroupsOffer) -> tuple[_Chain, tuple[Link, ...]]:
        """With what this silo signs now noted: the newest link that it holds and what is to follow, where its signature is not there."""
        held, proposed = self._link(content.held), self._link(content.proposed)
        to_sign: list[Link] = []
        for one in (held, proposed):
            head = None if held is None else held.link
            if one is None or (
                one is proposed and (self._refused(head, one.link) or self._objection(content, head, one))
            ):
                continue
            link = one.link
            offered = next((each for each in (*offer.links, offer.proposed) if each and each.link == link), None)
            voice = self._silo in link.members or (
                one is proposed and held is not None and self._silo in held.link.members
            )
            if offered is None or not voice or self._silo in signers(offered, {self._silo: self._own_key}):
                continue
            before, digest = link.previous.hex(), link.digest.hex()
            if content.signed.get(before, digest) != digest:
                if one is held:
                    continue  # the others went another way than this silo had signed
                raise PolicyRefusal(
                    RELEASE_GROUPS,
                    f"release groups {digest[:16]} are proposed, and this silo has signed {content.signed[before][:16]} in their place: "
                    "its people take that back with `silo-agent groups withdraw`, if the others never took it",
                )
            content = content.model_copy(update={"signed": {**content.signed, before: digest}})
            to_sign.append(link)
        return content, tuple(to_sign)

    def _objection(self, content: _Chain, head: Link | None, signed: SignedLink) -> str | None:
        if signed.link.digest.hex() in content.approved:
            return None
        return self._told(head, signed, with_silent=False)

    def _told(self, head: Link | None, proposed: SignedLink, *, with_silent: bool = True) -> str | None:
        """What people are told about `proposed`, `with_silent` with those who have not signed it."""
        keys = self._keys()
        learnt = objection(
            head,
            proposed.link,
            self._silo,
            pinned=keys.keys(),
            asks=self._asks,
            signed=signers(proposed, keys) if with_silent else None,
        )
        others = frozenset(keys) - {self._silo}
        compare = to_compare(proposed, self._silo, others, self._is_of_another_key(proposed)) if head is None else None
        return "; ".join(filter(None, (compare, learnt))) or None

    def _is_of_another_key(self, signed: SignedLink) -> bool:
        return is_of_another_key(signed, self._silo, [self._own_key]) and is_of_another_key(
            signed, self._silo, self._earlier().get(self._silo, ())
        )

    def _keys(self) -> dict[SiloName, Ed25519PublicKey]:
        return {**self._pinned(), self._silo: self._own_key}

    def _checked(self, signed: SignedLink | None) -> CheckedLink | None:
        if signed is None:
            return None
        keys = self._keys()
        good, names = signers(signed, keys), [silo for silo, _ in signed.signatures]
        return CheckedLink(
            link=signed.link,
            good=tuple(sorted(good)),
            unchecked=tuple(silo for silo in names if silo not in keys),
            false=tuple(silo for silo in names if silo in keys and silo not in good),
        )

    def _with_small(self, allowed: list[list[NameText]], link: Link, sets: Iterable[Group]) -> list[list[str]]:
        least = judged_by(link, self._asks.smallest_group)
        return [list(one) for one in sorted({*map(tuple, allowed), *(one for one in sets if len(one) < least)})]

    def _unapproved(self, content: _Chain, link: Link) -> tuple[Group, ...]:
        """As a roster is judged, by policy alone."""
        atom = link.atom_of(self._silo)
        if atom is None or self._silo not in link.members:
            return ()
        groups = _sets(content.approved_groups)
        atoms = groups | _sets(content.approved_atoms)
        found = [group for group in link.partition.groups if group not in groups]
        found += [atom] if atom not in atoms else []
        return tuple(sorted({one for one in found if len(one) < self._asks.smallest_group}))

    def _link(self, text: str) -> SignedLink | None:
        return _decoded(text, self._federation) if text else None

    def _check(self, content: _Chain) -> None:
        """Raises ConfigurationError or MalformedMessage for a file that this class would not have written."""
        if content.federation != self._federation:
            raise ConfigurationError(f"it is of federation {content.federation!r}, this silo is in {self._federation}")
        for text in (content.held, content.proposed):
            self._link(text)


def _check_on_the_way(content: _Chain, offer: GroupsOffer) -> None:
    """Raise PolicyRefusal for a silo that enrolled again, and then signed what is not among the links that stand."""
    links = {one.link.digest.hex() for one in offer.links}
    if links.isdisjoint(content.signed.values()):
        ours = next(reversed(content.signed.values()))
        raise PolicyRefusal(
            RELEASE_GROUPS,
            f"the release groups that stand have a signature in this silo's name by another key, and this silo signed {ours} in their "
            f"place: ask the people of the other silos which they hold, then take it back with `silo-agent groups withdraw {ours}`",
        )


def _holding(content: _Chain, previous: Link | None, signed: SignedLink) -> _Chain:
    """Of the signatures those of silos that sign it: others bring nothing, and take the room of earlier links."""
    known = signed.link.members | (frozenset() if previous is None else previous.members)
    signed = SignedLink(link=signed.link, signatures=tuple(one for one in signed.signatures if one[0] in known))
    return content.model_copy(update={"earlier": _earlier(content), "held": _text(signed), "proposed": ""})


def _earlier(content: _Chain) -> list[str]:
    """With the link that is held, before another takes its place; the oldest go where there is no room."""
    earlier = [*content.earlier, *filter(None, [content.held])]
    while sum(map(len, earlier)) > MOST_EARLIER:
        earlier.pop(0)
    return earlier


def _sets(groups: Iterable[Iterable[str]]) -> frozenset[Group]:
    return frozenset(tuple(map(SiloName, group)) for group in groups)


def changes_of(path: Path, seal: Seal) -> int:
    """How often the file changed; 0 where there is none. Raises ConfigurationError, StorageError as GroupChain does."""
    return PrivateRecord(path, _Chain, check=lambda _content: None, remedy=_REMEDY, seal=seal).read().changes


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left of release-groups.json, for people who decide about it.

    `held` and `lost` are numbers of links, 0 where there is none; `approvals`, whether people's word or a proposal stands in it;
    `ours`, whether this silo wrote it.
    """

    held: int
    lost: int
    approvals: bool
    ours: bool


def left_of(path: Path, federation: FederationName, seal: Seal) -> Left:
    """Whoever wrote it. Raises ConfigurationError, StorageError."""
    content = _taken_over(path, federation, seal).read(whoever_wrote_it=True)
    said = (content.approved, content.approved_atoms, content.approved_groups, content.proposed)
    ours = _is_ours(path, seal)
    return Left(held=_number(content) if ours else 0, lost=content.lost, approvals=any(said), ours=ours)


def take_over(
    path: Path,
    federation: FederationName,
    seal: Seal,
    known: GroupsNote,
    *,
    proven: bool = False,
    as_held: bool = False,
) -> GroupsNote:
    """By word of people what is there counts from now on, whoever wrote it. Raises ConfigurationError, StorageError.

    Unless it is `proven` that this silo wrote the file, and last, what it says of people's approvals and of proposed links is
    dropped; where somebody else wrote it, the link that is held, too: its signatures are checked when it is offered again. Where links that are `known` of were lost, none before them is held, no key is taken on first use, and the successor
    that was signed last stays the only one. `as_held`: people say that no link was lost, whatever number is noted.
    """
    note = known
    ours = _is_ours(path, seal)

    def edit(content: _Chain) -> _Chain:
        nonlocal note
        number = max(known.number, int(bool(content.held)))
        if not ours:
            content = content.model_copy(update={"held": ""})
        held = _number(content)
        lost = number if held < number else content.lost
        if as_held:
            lost = min(lost, max(held, 1))  # 1: first use stays over
        after = content.model_copy(
            update={
                "federation": federation,
                "changes": max(content.changes, known.changes) + 1,
                "lost": lost,
                "signed": {**content.signed, **known.signed},
            }
        )
        if not proven:
            after = after.model_copy(
                update={"proposed": "", "approved": {}, "approved_atoms": [], "approved_groups": []}
            )
        note = _note(after)
        return after

    if known != GroupsNote() or is_there(path):
        _taken_over(path, federation, seal).change(edit, whoever_wrote_it=True)
    return note


def _is_ours(path: Path, seal: Seal) -> bool:
    """Whether this silo wrote it, or nobody did."""
    try:
        changes_of(path, seal)
    except ConfigurationError:
        return False
    return True


def _taken_over(path: Path, federation: FederationName, seal: Seal) -> PrivateRecord[_Chain]:
    """The file as people take it over: anything that could not be gone on from is as good as no file."""

    def check(content: _Chain) -> None:
        if content.federation != federation:
            raise ConfigurationError(f"it is of federation {content.federation!r}, this silo is in {federation}")
        require_plausible(content.changes, "changes")
        _number(content)

    return PrivateRecord(path, _Chain, check=check, remedy=_REMEDY, seal=seal)


def _note(content: _Chain) -> GroupsNote:
    return GroupsNote(
        changes=content.changes,
        number=max(_number(content), content.lost),
        signed=dict(list(content.signed.items())[-1:]),
    )


def _number(content: _Chain) -> int:
    """Of the link that is held, 0 where none is. Raises MalformedMessage."""
    if not content.held:
        return 0
    return _decoded(content.held, FederationName(content.federation)).link.number


def _decoded(text: str, federation: FederationName) -> SignedLink:
    """Raises MalformedMessage."""
    try:
        data = b64decode(text, validate=True)
    except ValueError as error:
        raise MalformedMessage("release groups are no base64: they are damaged") from error
    return signed_groups_from_bytes(data, federation)


def _text(signed: SignedLink) -> str:
    return b64encode(signed_groups_to_bytes(signed)).decode()
