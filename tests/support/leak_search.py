"""A hostile coordinator that chooses everything it may choose, against real silo machines and real chains of release
groups.

It picks plans, rounds, attempt numbers, models, cohorts, partitions and to whom they are shown, survivor sets (another
one for each silo, if it likes), who is lost, and when honest silos restart. Colluding silos sign what it wants; people
approve each partition that makes no atom too small and promises no less than before. Silos come later and leave. In a
mixed world policies differ, and what a silo's own policy says must hold for it, whatever the others' say. It collects
each sum that comes out as a vector over the silos alone: a silo's delta is taken to be the same in all rounds, plans
and models, which is the worst case.

`least_support` then says, by rank, of how few honest silos some combination of those sums is: whoever collected them
knows the colluders' parts, and can subtract one sum from another.
"""

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np
from blake3 import blake3

from lorica_security.errors import LoricaError
from lorica_security.identifiers import SiloName
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.groups.release_groups import (
    Link,
    Partition,
    Promise,
    SignedLink,
    first_link,
    least_group,
    signature_of,
    successor,
)
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Delivery,
    MaskedInput,
    Reveal,
    SelfMaskShare,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
    dealings_digest,
    signed,
)
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import states as silo_states
from silo_agent.edges.groups.group_chain import GroupChain
from silo_wire.codecs.groups_codec import GroupsOffer
from tests.support.secagg_federation import (
    FEDERATION,
    Silo,
    attempt,
    entropy,
    identities,
    identity_key,
    opening,
    party,
    ranges,
    silo_names,
)

PLANS = (bytes(31) + b"\x01", bytes(31) + b"\x02")
MODELS = (bytes(31) + b"\x03", bytes(31) + b"\x04")


class PlayedSilo(Silo):
    """Whose vector costs nothing: what it sends is a digest."""

    def mask(self, effect: silo_effects.MaskVector) -> bytes:
        effect.erase()
        return blake3(self.name.encode() + self.state.opening.attempt.id).digest()  # type: ignore[union-attr]


@dataclass
class World:
    """`count` silos, of which the last `colluders` by name work with the coordinator."""

    folder: Path
    count: int
    colluders: int
    smallest_group: int
    seed: int
    strict_share: float = (
        1.0  # of the honest silos after the first: they ask for the numbers above, the others for the least
    )
    sums: set[frozenset[SiloName]] = field(default_factory=set)
    links: list[SignedLink] = field(default_factory=list)
    reached: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.habits = {name: self.draw.random() for name in ("apart", "whole groups", "same told", "no path", "links")}
        self.names = silo_names(self.count)
        self.honest = self.names[: self.count - self.colluders]
        keys = identities(self.names)
        strict = silo_party.Demands(smallest_group=self.smallest_group, colluders=self.colluders)
        self.mixed = self.strict_share < 1
        others = (name for name in self.honest[1:] if not self.mixed or self.draw.random() < self.strict_share)
        self.strict = [self.names[0], *others]
        self.demands = {name: strict if name in self.strict else silo_party.Demands() for name in self.names}
        self.promise = Promise(colluders=self.colluders, smallest_group=strict.least_group)
        self.chains = {
            name: GroupChain(
                self.folder / f"{self.seed}-{name}",
                federation=FEDERATION,
                silo=name,
                own_key=keys[name],
                pinned=lambda name=name: {peer: key for peer, key in keys.items() if peer != name},  # type: ignore[misc]
                smallest_group=self.demands[name].least_group,
                colluders=self.demands[name].colluders,
                seal=Seal(identity_key(name)),
            )
            for name in self.honest
        }
        self.silos = {name: PlayedSilo(party(name, self.names, demands=self.demands[name])) for name in self.names}
        self.least_group = strict.least_group
        self.moves: Counter[str] = Counter()
        for name in self.names:
            self.follow(name)

    def follow(self, name: SiloName) -> None:
        """What the silo holds of the chain goes into its next answers; a colluder holds whatever it is shown."""
        each = self.silos[name]
        chain = self.chains.get(name)
        if chain is not None:
            each.party = replace(each.party, link=chain.head, approved=chain.approved_groups)
            each.party = replace(each.party, approved_atoms=chain.approved_atoms)

    def tends(self, habit: str) -> bool:
        """Each world has habits of its own, so that some of them scheme the same way all along."""
        return self.draw.random() < self.habits[habit]

    @property
    def held(self) -> list[Link]:
        """By one honest silo or another."""
        return [link for name in self.honest if (link := self.silos[name].party.link) is not None]

    # ---- release groups ---------------------------------------------------------------------------------------------

    def show(self, name: SiloName, offer: GroupsOffer) -> list[Link]:
        """To one silo; what it signs."""
        if name not in self.chains:
            return [one.link for one in (*offer.links, offer.proposed) if one is not None]
        chain = self.chains[name]
        try:
            taken = chain.take(offer)
            waiting = chain.standing().proposed if taken.waits else None
            if waiting is not None and self._harmless(name, waiting.link, chain.head):
                chain.approve(waiting.link.digest.hex())
                taken = chain.take(offer)
        except LoricaError:
            return []
        finally:
            self.follow(name)
        self.moves["links taken"] += len(taken.links)
        return list(taken.to_sign)

    def _harmless(self, name: SiloName, link: Link, head: Link | None) -> bool:
        """As people read it who allow no small set, and no promise that falls."""
        least = max(self.demands[name].least_group, link.promise.smallest_group)
        falls = head is not None and link.promise.lacks(head.promise)
        return not falls and all(len(one) >= least for one in (*link.atoms, *link.partition.groups))

    def propose(self, link: Link, to: Iterable[SiloName]) -> None:
        """Collect what signatures there are, in two tellings, and keep the link whether or not it has enough."""
        known = self.signed(link)
        for name in to:
            for one in self.show(name, GroupsOffer(links=self.before(link), proposed=known, identities=())):
                if one == link:
                    known = known.signed_by(name, signature_of(link, identity_key(name)))
        self.links = [*(one for one in self.links if one.link != link), known]

    def signed(self, link: Link) -> SignedLink:
        """With the signatures that were collected."""
        return next((one for one in self.links if one.link == link), SignedLink(link=link))

    def before(self, link: Link) -> tuple[SignedLink, ...]:
        """The links that lead to `link`, oldest first, with the signatures that are there."""
        by_digest = {one.link.digest: one for one in self.links}
        path: list[SignedLink] = []
        at = by_digest.get(link.previous)
        while at is not None:
            path.insert(0, at)
            at = by_digest.get(at.link.previous)
        return tuple(path)

    def stand(self, link: Link, to: Iterable[SiloName]) -> None:
        """Say to these silos that `link` has what it needs."""
        known = next((one for one in self.links if one.link == link), None)
        if known is not None:
            path = () if self.tends("no path") else self.before(link)
            for name in to:
                self.show(name, GroupsOffer(links=(*path, known), proposed=None, identities=()))

    def any_link(self) -> Link:
        """A new one: of any partition, mostly after what some silo holds, and often with a group of those who hold just
        that."""
        draw = self.draw
        known = self.held if self.held and draw.random() < 0.8 else [one.link for one in self.links]
        before = draw.choice(known) if known and draw.random() < 0.9 else None
        members = list(self.names if draw.random() < 0.8 else self.some(self.names, least=3))
        draw.shuffle(members)
        if self.tends("apart"):
            members.sort(key=lambda name: self.silos[name].party.link != before)
        groups: list[list[SiloName]] = []
        while members:
            size = self.least_group if draw.random() < 0.6 else draw.randint(2, max(2, len(members)))
            if 0 < len(members) - size < self.least_group:
                size = len(members)
            groups.append(members[:size])
            members = members[size:]
        partition = Partition.of(groups)
        promise = self.any_promise()
        return first_link(FEDERATION, partition, promise) if before is None else successor(before, partition, promise)

    def any_promise(self) -> Promise:
        """Mostly what some silos ask for, and in a mixed world what others are content with."""
        if not self.mixed or self.draw.random() < 0.7:
            return self.promise
        colluders = self.draw.randint(0, self.colluders)
        return Promise(colluders=colluders, smallest_group=self.draw.randint(least_group(colluders), self.least_group))

    def told(self, link: Link) -> tuple[SiloName, ...]:
        """Everybody, some whole groups of a link, or just some."""
        choice = self.draw.random()
        if self.tends("whole groups"):
            ready = [group for group in link.partition.groups if all(self._near(name, link) for name in group)]
            return tuple(sorted(silo for group in self._few(ready or link.partition.groups) for silo in group))
        if choice < 0.7:
            return self.names
        return self.some(self.names, least=2)

    def _near(self, name: SiloName, link: Link) -> bool:
        held = self.silos[name].party.link
        return held is not None and held.digest in (link.previous, link.digest)

    # ---- sums -------------------------------------------------------------------------------------------------------

    def some(self, names: Sequence[SiloName], *, least: int) -> tuple[SiloName, ...]:
        size = self.draw.randint(min(least, len(names)), len(names))
        return tuple(sorted(self.draw.sample(list(names), size)))

    def run_attempt(self, link: Link | None = None, cohort: Sequence[SiloName] = ()) -> None:
        """One attempt with everything else chosen at random; what sums come out is kept."""
        draw = self.draw
        plan = draw.choice(PLANS)
        round_, number = self._when(plan)
        of = attempt(round=round_, number=number, plan=plan, salt=str(draw.random()))
        if link is None:
            shown = [one.link for one in self.links] or [self.everybody()]
            link = draw.choice(self.held if self.held and draw.random() < 0.8 else shown)
        cohort = cohort or self.told(link)
        model = draw.choice(MODELS)
        keys: list[Advertisement] = []
        for name in cohort:
            self._end(name)
            keys += self._take(name, opening(name, of, model=model), link)
        members = [it.silo for it in keys]
        against = link.promise.colluders if self.mixed else self.colluders
        least = least_group(against) if self.mixed else self.least_group
        terms = Terms(model=model, ranges=ranges(), link=link, colluders=against, min_survivors=least)
        try:
            roster = Roster(
                attempt=of, model=model, link=link.digest, parameters=terms.parameters(members), members=tuple(keys)
            )
        except LoricaError:
            return
        dealt: list[SharedKeys] = []
        for name in members:
            dealt += self._take(name, roster, link)
        dealings = tuple(item.dealing for item in dealt)
        inputs: dict[SiloName, MaskedInput] = {}
        for item in dealt:
            boxes = tuple(box for other in dealt for box in other.boxes if box.holder == item.silo)
            delivery = Delivery(roster=roster.digest, holder=item.silo, dealings=dealings, boxes=boxes)
            for answer in self._take(item.silo, delivery, link):
                inputs[item.silo] = answer
        if len(inputs) < 2:
            return
        if draw.random() < 0.2:
            again = draw.choice(list(inputs))
            self.silos[again].restart()
            self.follow(again)
        self._unmask(roster, dealings_digest(dealings), inputs, link)

    def _when(self, plan: bytes) -> tuple[int, int]:
        """Mostly what comes next, so that silos answer; else any time at all."""
        draw = self.draw
        round_, number = self.reached.get(plan, (0, 1))
        choice = draw.random()
        if choice < 0.6:
            round_, number = round_ + 1, 1
        elif choice < 0.85:
            round_, number = max(round_, 1), number + 1
        else:
            return draw.randint(1, round_ + 1), draw.randint(1, number + 1)
        self.reached[plan] = round_, number
        return round_, number

    def _unmask(self, roster: Roster, dealings: bytes, inputs: dict[SiloName, MaskedInput], link: Link) -> None:
        draw, there = self.draw, tuple(inputs)
        asked: list[SurvivorSet] = []
        for _ in range(draw.choice((1, 1, 2))):
            choice = draw.random()
            silos: tuple[SiloName, ...] = there
            if choice < 0.6:  # of those that some partition puts together
                known = [one.link.partition for one in self.links] or [link.partition]
                chosen = draw.choice((link.partition, draw.choice(known)))
                unions = [group for group in chosen.groups if set(group) <= set(there)]
                if unions:
                    silos = tuple(sorted({it for group in self._few(unions) for it in group}))
            elif choice < 0.85:
                silos = self.some(there, least=2)
            asked.append(
                SurvivorSet(
                    roster=roster.digest,
                    dealings=dealings,
                    silos=silos,
                    inputs=tuple(inputs[name].vector for name in silos),
                )
            )
        agreed: dict[bytes, list[Agreement]] = {one.digest: [] for one in asked}
        for name in there:
            if name not in self.honest:
                for one in asked:
                    word = Agreement(roster=roster.digest, silo=name, survivors=one.digest)
                    agreed[one.digest].append(signed(word, identity_key(name)))
                continue
            one = draw.choice(asked)
            for answer in self._take(name, one, link):
                agreed[one.digest].append(answer)
        for one in asked:
            agreements = tuple(sorted({it.silo: it for it in agreed[one.digest]}.values(), key=lambda it: it.silo))
            request = UnmaskRequest(roster=roster.digest, agreements=agreements)
            reveals: list[Reveal] = []
            for name in there:
                if name in self.honest:
                    reveals += self._take(name, request, link)
            if self._comes_out(one, roster, reveals):
                self.sums.add(frozenset(one.silos))
                self.moves["sums"] += 1

    def _few(self, groups: Sequence[tuple[SiloName, ...]]) -> Sequence[tuple[SiloName, ...]]:
        return self.draw.sample(list(groups), self.draw.randint(1, len(groups)))

    def _comes_out(self, survivors: SurvivorSet, roster: Roster, reveals: Sequence[Reveal]) -> bool:
        """With the shares that were revealed, and all those that colluders hold: they show both of everybody."""
        colluding = sum(1 for name in roster.silos if name not in self.honest)
        shown = {(share.dealer, type(share) is SelfMaskShare): 0 for reveal in reveals for share in reveal.shares}
        for reveal in reveals:
            for share in reveal.shares:
                shown[share.dealer, type(share) is SelfMaskShare] += 1
        wanted = [(dealer, dealer in survivors.silos) for dealer in {dealer for dealer, _ in shown}]
        threshold = roster.parameters.threshold
        return bool(wanted) and all(shown.get(one, 0) + colluding >= threshold for one in wanted)

    def _take(self, name: SiloName, event: silo_events.Event, link: Link) -> list[object]:  # type: ignore[valid-type]
        each = self.silos[name]
        if name not in self.honest:
            each.party = replace(each.party, link=link, approved=frozenset((*link.atoms, *link.partition.groups)))
        try:
            return each.take(event)
        except LoricaError:
            return []

    def _end(self, name: SiloName) -> None:
        each = self.silos[name]
        if isinstance(each.state, silo_states.InAttempt):
            each.take(silo_events.AttemptEnded(each.state.attempt))

    def everybody(self) -> Link:
        return first_link(FEDERATION, Partition.of([self.names]), self.promise)

    # ---- a whole schedule -------------------------------------------------------------------------------------------

    def play(self, steps: int) -> "World":
        if self.draw.random() < 0.9 or self.mixed:
            first = self.everybody()
            if self.mixed and self.draw.random() < 0.5:  # the others come later
                some = self.some(self.names, least=self.least_group)
                first = first_link(FEDERATION, Partition.of([some]), self.any_promise())
            self.propose(first, self.names)
            self.stand(first, self.names)
        for _ in range(steps):
            if self.draw.random() < 0.6 * self.habits["links"]:
                link = self.any_link()
                to = self.told(link)
                self.propose(link, to)
                self.stand(link, to if self.tends("same told") else self.told(link))
            else:
                self.run_attempt()
        return self

    def play_apart(self, steps: int) -> "World":
        """Each sum under another partition, which is shown to nobody but those who are in that sum."""
        everybody = self.everybody()
        for step in range(steps):
            link, told = everybody, self.names
            if step:
                members = self.draw.sample(self.names, len(self.names))
                cut = self.draw.randint(self.least_group, len(members) - self.least_group)
                link = successor(everybody, Partition.of([members[:cut], members[cut:]]))
                told = self.draw.choice(link.partition.groups)
            self.propose(link, told)
            for name in told:
                path = (signed for signed in self.links if signed.link in (everybody, link))
                self.show(name, GroupsOffer(links=tuple(path), proposed=None, identities=()))
            self.run_attempt(link, told)
        return self

    @property
    def least_support(self) -> int | None:
        """The fewest honest silos that some combination of the sums is of, where one of them is strict; None: there is
        no sum."""
        return least_support(self.sums, self.honest, self.strict)


def least_support(
    sums: Iterable[frozenset[SiloName]], honest: Sequence[SiloName], with_one_of: Sequence[SiloName] | None = None
) -> int | None:
    """By rank: a combination is of `silos`, `name` among them, alone if and only if `name`'s column adds a dimension to
    all others'."""
    rows = np.array([[float(name in one) for name in honest] for one in sums])
    wanted = range(len(honest)) if with_one_of is None else [honest.index(name) for name in with_one_of]
    if not rows.size or not rows[:, list(wanted)].any():
        return None
    for size in range(1, len(honest) + 1):
        for silos in combinations(range(len(honest)), size):
            rest = [index for index in range(len(honest)) if index not in silos]
            least = _rank(rows[:, rest])
            if any(_rank(rows[:, [*rest, index]]) > least for index in silos if index in wanted):
                return size
    raise AssertionError("leaving out everything loses every dimension")


def _rank(rows: np.ndarray) -> int:
    return int(np.linalg.matrix_rank(rows)) if rows.size else 0


def seeded(*names: object) -> int:
    return int.from_bytes(entropy(*names)[:6], "big")
