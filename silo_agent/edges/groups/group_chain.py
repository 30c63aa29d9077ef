"""The release groups that this silo holds, in `release-groups.json` of its folder: the newest link, what it signed,
what people approved.

Rules that hold whatever the coordinator offers:

- a link is taken only after the one that this silo holds, with the signatures that it needs, under the keys that are
  pinned here, and under earlier ones where enough others went on from it (`group_return.stand_by`);
- one successor of a link is signed, and that is on disk before the signature leaves; people alone take a signature
  back;
- a link that promises less than this silo's policy asks for, or so much that nothing could follow it, is refused,
  whoever signed it;
- what `group_changes.objection` finds is for this silo's people: until they approve, the link is neither signed nor
  taken.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.console.strict_toml import NameText
from lorica_security.errors import ConfigurationError, MalformedMessage, PolicyRefusal, StateError
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.groups.group_changes import judged_by, objection
from lorica_security.secure_aggregation.groups.release_groups import (
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
from silo_agent.edges.disk.counted_record import CountedRecord, Notes
from silo_agent.edges.groups.group_return import EarlierKeys, is_of_another_key, lacks, stand_by, to_compare
from silo_agent.edges.memory.group_file import (
    REMEDY,
    ChainContent,
    GroupsKeeper,
    decoded,
    holding,
    note_of,
    sets_of,
    text_of,
)
from silo_wire.codecs.groups_codec import GroupsOffer


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedLink:
    """A link, and whose signatures under it this silo finds good, cannot check for want of a pinned key, and finds
    false."""

    link: Link
    good: tuple[SiloName, ...]
    unchecked: tuple[SiloName, ...]
    false: tuple[SiloName, ...]


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
    """What came of an offer: links that this silo holds now and did not before, what it has to sign, what waits for its
    people.

    `refused`: why what is proposed is refused, and is not for people to allow.
    """

    links: tuple[Link, ...] = ()
    to_sign: tuple[Link, ...] = ()
    waits: str | None = None
    refused: str | None = None


class GroupChain:
    """Each call reads the file. `pinned` gives the peers whose keys count, as of now, `earlier` the keys that they and
    this silo had before.

    Raises ConfigurationError naming the file when it is damaged, edited, or when others can read it, PolicyRefusal
    where `keeper` knows of a newer one, StorageError.
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
        notes: Notes[ChainContent] | None = None
        if keeper is not None:
            notes = Notes(check=keeper.check_groups, note=lambda content: keeper.note_groups(note_of(content)))
        self._record = CountedRecord(path, ChainContent, check=self._check, remedy=REMEDY, seal=seal, notes=notes)

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
        return sets_of(self._record.read().approved_atoms)

    @property
    def approved_groups(self) -> frozenset[Group]:
        """Small release groups that people allowed."""
        return sets_of(self._record.read().approved_groups)

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
        """Take the links that follow, and keep what is proposed; what is to be signed is on disk as signed when this
        returns.

        Raises PolicyRefusal for links that do not follow from what this silo holds, or lack signatures; nothing of them
        is kept.
        """
        taken = Taken()
        if not offer.links and offer.proposed is None and self.is_new:
            return taken  # where nobody masks, a silo has no file that says that it may have

        def edit(content: ChainContent) -> ChainContent:
            nonlocal taken
            content, new, waits = self._followed(content, offer)
            content, proposed_waits, refused = self._noted(content, offer)
            content, to_sign = self._signed(content, offer)
            taken = Taken(links=new, to_sign=to_sign, waits=waits or proposed_waits, refused=refused)
            return content.model_copy(update={"federation": self._federation})

        self._record.change(edit)
        return taken

    def approve(self, digest: str) -> tuple[Link, str]:
        """People allow what is proposed, or what is held; the link, and what they were told. Raises StateError for any
        other.

        What is held waits for them again where policy asks for more than when it was taken, or what they had approved
        was dropped.
        """
        told: tuple[Link, str] | None = None

        def edit(content: ChainContent) -> ChainContent:
            nonlocal told
            proposed, held = self._link(content.proposed), self._link(content.held)
            signed = next((one for one in (proposed, held) if one and one.link.digest.hex() == digest), None)
            if signed is None:
                raise StateError(
                    f"no release groups {digest} are proposed or held: `silo-agent groups show` has what is, with "
                    "its digest"
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
        """People take a signature back, so that another successor may be signed: towards the others this silo then
        counts as a colluder.

        The number of the link, which need not be proposed any more; None where nothing here tells. Raises StateError
        for one that stands, or that this silo did not sign to follow what it holds.
        """
        number: int | None = None

        def edit(content: ChainContent) -> ChainContent:
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

    def _followed(self, content: ChainContent, offer: GroupsOffer) -> tuple[ChainContent, tuple[Link, ...], str | None]:
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
                        f"release groups {link.number} are {link.digest.hex()[:16]} at the coordinator, this silo "
                        f"holds {head.digest.hex()[:16]}: somebody signed two; ask the other silos' people which they "
                        f"hold",
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
                return content.model_copy(update={"proposed": text_of(signed)}), tuple(new), reason
            head = before = link
            new.append(link)
            content = holding(content, after, signed)
        return content, tuple(new), None

    def _come_back(
        self, content: ChainContent, offer: GroupsOffer
    ) -> tuple[ChainContent, tuple[Link, ...], str | None]:
        """For a silo whose name signed with a key that it does not have: it lost its folder, and enrolled again.

        It cannot check its own earlier signature, nor those of silos that left. People find out which link stands: the
        one whose digest they approved is taken, where all whose keys are pinned signed as they must, and then what
        follows that one.
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
            return content.model_copy(update={"proposed": text_of(newest)}), (), self._objection(content, None, newest)
        content, new, waits = self._followed(holding(content, previous, newest), offer)
        return content, (link, *new), waits

    def _check_follows(self, previous: Link | None, link: Link) -> None:
        try:
            check_successor(previous, link)
        except MalformedMessage as error:
            raise PolicyRefusal(RELEASE_GROUPS, str(error)) from error

    def _check_signed(
        self, content: ChainContent, previous: Link | None, signed: SignedLink, offer: GroupsOffer
    ) -> None:
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
                f"release groups {signed.link.number} ({signed.link.digest.hex()[:16]}) lack {needed} signatures "
                f"that this silo can check, of {', '.join(sorted(silos))}",
            )

    def _noted(self, content: ChainContent, offer: GroupsOffer) -> tuple[ChainContent, str | None, str | None]:
        """What is proposed, kept for people to look at, where it follows what this silo holds; why it waits, or is
        refused."""
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
        content = content.model_copy(update={"proposed": text_of(offer.proposed)})
        return content, self._objection(content, head, offer.proposed), None

    def _refused(self, head: Link | None, link: Link) -> str | None:
        """Why this silo has no part in a link that promises what nothing could follow, or less than its policy asks
        for.

        None: it has, or what the link promises is no concern of it.
        """
        concerned = self._silo in link.members or (head is not None and self._silo in head.members)
        return out_of_reach(link) or (too_little(link, self._asks) if concerned else None)

    def _signed(self, content: ChainContent, offer: GroupsOffer) -> tuple[ChainContent, tuple[Link, ...]]:
        """With what this silo signs now noted: the newest link that it holds and what is to follow, where its signature
        is not there."""
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
                    f"release groups {digest[:16]} are proposed, and this silo has signed "
                    f"{content.signed[before][:16]} in their place: its people take that back with `silo-agent groups "
                    "withdraw`, if the others never took it",
                )
            content = content.model_copy(update={"signed": {**content.signed, before: digest}})
            to_sign.append(link)
        return content, tuple(to_sign)

    def _objection(self, content: ChainContent, head: Link | None, signed: SignedLink) -> str | None:
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

    def _unapproved(self, content: ChainContent, link: Link) -> tuple[Group, ...]:
        """As a roster is judged, by policy alone."""
        atom = link.atom_of(self._silo)
        if atom is None or self._silo not in link.members:
            return ()
        groups = sets_of(content.approved_groups)
        atoms = groups | sets_of(content.approved_atoms)
        found = [group for group in link.partition.groups if group not in groups]
        found += [atom] if atom not in atoms else []
        return tuple(sorted({one for one in found if len(one) < self._asks.smallest_group}))

    def _link(self, text: str) -> SignedLink | None:
        return decoded(text, self._federation) if text else None

    def _check(self, content: ChainContent) -> None:
        """Raises ConfigurationError or MalformedMessage for a file that this class would not have written."""
        if content.federation != self._federation:
            raise ConfigurationError(f"it is of federation {content.federation!r}, this silo is in {self._federation}")
        for text in (content.held, content.proposed):
            self._link(text)


def _check_on_the_way(content: ChainContent, offer: GroupsOffer) -> None:
    """Raise PolicyRefusal for a silo that enrolled again, and then signed what is not among the links that stand."""
    links = {one.link.digest.hex() for one in offer.links}
    if links.isdisjoint(content.signed.values()):
        ours = next(reversed(content.signed.values()))
        raise PolicyRefusal(
            RELEASE_GROUPS,
            "the release groups that stand have a signature in this silo's name by another key, and this silo "
            f"signed {ours} in their place: ask the people of the other silos which they hold, then take it back with "
            f"`silo-agent groups withdraw {ours}`",
        )
