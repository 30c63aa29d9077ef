"""A silo whose disk went back as a whole is told so by the others of its release group, before it deals to anybody.

A hostile coordinator chooses the cohorts, how far each attempt gets and with whom, which attempts it only pretends to
open, and the instants at which the silo's disk is copied and put back. It colludes with some silos, which say of others
what it likes.
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from lorica_security.errors import LoricaError, PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.messages import Advertisement, Delivery, SharedKeys, signed
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import resumption as silo_resumption
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import MASKING_MEMORY, MAX_ANNOUNCED, Forgotten, SiloMemory
from lorica_security.secure_aggregation.silo.phases import masked_input as silo_masked_input
from tests.support.leak_search import seeded
from tests.support.secagg_federation import (
    FEDERATION,
    MODEL,
    Federation,
    Silo,
    attempt,
    identity_key,
    opening,
    party,
    silo_names,
)
from tests.support.secagg_federation import terms as terms_of

SCHEDULES = int(os.environ.get("LORICA_SCHEDULES", "3"))
NAMES = silo_names(6)
VICTIM, HONEST, *COLLUDERS = NAMES[:3]
LINK = first_link(FEDERATION, Partition.of([NAMES[:3], NAMES[3:]]))


def disk_of(each: Silo) -> Silo:
    """The silo as it is after its disk was put back to what it is now."""
    journal = [
        replace(event, root=Secret(event.root.buffer)) if isinstance(event, silo_events.OpenAttempt) else event
        for event in each.journal
    ]
    state, _ = silo_resumption.restored(each.memory, tuple(journal), each.party)
    return Silo(each.party, state=state, memory=each.memory, journal=journal)


class Schemer:
    """VICTIM is the only one whose disk goes back, HONEST the only other of its group that does not collude."""

    def __init__(self, seed: int, *, lies: bool = False) -> None:
        self.draw = random.Random(seed)
        self.lies = lies
        self.silos = {name: Silo(party(name, NAMES, link=LINK, approved=frozenset())) for name in NAMES}
        self.round = 0
        self.copies: list[tuple[Silo, int]] = []
        self.witnessed = 0
        """By how many of its keys the honest silo of its group saw the victim deal."""
        self.known = 0
        """How many of these the victim's disk is from after."""
        self.dealt_behind = self.refused = self.wrongly_refused = self.dealt = 0
        self.made: dict[SiloName, list[bytes]] = {name: [] for name in NAMES}

    def advertised(self, name: SiloName) -> Advertisement | None:
        each = self.silos[name]
        if isinstance(each.state, silo_states.InAttempt):
            each.take(silo_events.AttemptEnded(each.state.attempt))
        of = attempt(round=self.round, salt=str(self.draw.random()))
        try:
            (made,) = each.take(opening(f"{name}{self.draw.random()}", replace(of, id=self.id)))
        except PolicyRefusal:
            return None
        self.made[name].append(made.digest)
        return made

    def attempt(self, cohort: tuple[SiloName, ...]) -> None:
        """Everybody of the cohort advertises; the roster goes to some of them, in any order."""
        self.round += 1
        self.id = self.draw.randbytes(32)
        members = [made for name in cohort if (made := self.advertised(name)) is not None]
        members = [self.altered(member) for member in members]
        known_here = self.witnessed
        try:
            parameters = terms_of(link=LINK).parameters([member.silo for member in members])
            roster = Roster(
                attempt=members[0].attempt,
                model=MODEL,
                link=LINK.digest,
                parameters=parameters,
                members=tuple(members),
            )
        except (LoricaError, IndexError):
            return
        dealt = [shared for name in self.some(roster.silos) for shared in self.share(name, roster, known_here)]
        if self.draw.random() < 0.1:
            self.put_back()
        for name in self.some([shared.silo for shared in dealt]):
            self.deliver(name, roster, dealt)

    def some(self, names: Sequence[SiloName]) -> list[SiloName]:
        """Mostly all of them, in any order."""
        size = len(names) if self.draw.random() < 0.7 else self.draw.randint(0, len(names))
        return self.draw.sample(list(names), size)

    def put_back(self) -> None:
        if self.copies:
            disk, self.known = self.draw.choice(self.copies)
            self.silos[VICTIM] = disk_of(disk)

    def altered(self, member: Advertisement) -> Advertisement:
        """What a colluder says of others, when it lies: that it saw none, or any that they ever made."""
        if member.silo not in COLLUDERS or not self.lies or self.draw.random() < 0.3:
            return member
        seen = tuple((name, self.draw.choice(self.made[name])) for name, _ in member.seen if self.draw.random() < 0.5)
        return signed(replace(member, seen=seen), identity_key(member.silo))

    def share(self, name: SiloName, roster: Roster, known_here: int) -> list[SharedKeys]:
        each = self.silos[name]
        try:
            (shared,) = each.take(roster)
        except Forgotten as forgotten:
            self.refused += 1
            self.wrongly_refused += name != VICTIM or not set(forgotten.witnesses) - set(each.memory.announced)
            return []
        except LoricaError:
            return []
        if name == VICTIM:
            self.dealt += 1
            self.dealt_behind += HONEST in roster and self.known < known_here
        return [shared]

    def deliver(self, name: SiloName, roster: Roster, dealt: list[SharedKeys]) -> None:
        dealt = sorted(dealt, key=lambda it: it.silo)
        delivery = Delivery(
            roster=roster.digest,
            holder=name,
            dealings=tuple(it.dealing for it in dealt),
            boxes=tuple(box for it in dealt for box in it.boxes if box.holder == name),
        )
        try:
            self.silos[name].take(delivery)
        except LoricaError:
            return
        if name == HONEST and VICTIM in delivery.dealers:
            self.witnessed += 1
            if self.silos[VICTIM].memory.announced[-1:] == (roster.member(VICTIM).digest,):
                self.known = self.witnessed  # the victim's disk is of this very attempt

    def move(self) -> None:
        victim = self.silos[VICTIM]
        choice = self.draw.random()
        if choice < 0.25:
            self.copies.append((disk_of(victim), self.known))
        elif choice < 0.35:
            self.put_back()
        elif choice < 0.5:  # it only pretends that there is an attempt
            for _ in range(self.draw.randint(1, 4)):
                self.attempt((VICTIM,))
        else:
            alone = self.draw.random() < 0.5
            self.attempt(NAMES[:3] if alone else tuple(sorted(self.draw.sample(NAMES, self.draw.randint(3, 6)))))


def played(*what: object, moves: int = 25) -> Schemer:
    world = Schemer(seeded("memory", *what), lies=bool(seeded(*what) % 2))
    for _ in range(moves):
        world.move()
    return world


def test_attack_a_disk_that_went_back_never_deals_beside_one_honest_silo_of_its_group() -> None:
    worlds = [played(number) for number in range(2 * SCHEDULES)]
    assert not any(world.dealt_behind for world in worlds)
    assert not any(world.wrongly_refused for world in worlds)
    assert sum(world.dealt for world in worlds) > SCHEDULES
    assert sum(world.refused for world in worlds) > 0


def seen_in_rosters(state: silo_states.Dealt, delivery: Delivery, party: silo_party.Party) -> SiloMemory:
    """Of everybody in the roster, dealt or not."""
    return state.memory.with_seen({it.silo: it.digest for it in state.roster.members}, members=NAMES)


def nothing_seen(state: silo_states.Dealt, delivery: Delivery, party: silo_party.Party) -> SiloMemory:
    return state.memory


@pytest.mark.parametrize("broken", [seen_in_rosters, nothing_seen])
def test_without_the_rule_the_schemes_find_what_it_is_there_for(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., SiloMemory]
) -> None:
    monkeypatch.setattr(silo_masked_input, "_having_seen", broken)
    assert any(played("broken", number).dealt_behind for number in range(60))


def group_of_three(rounds: int) -> dict[SiloName, Silo]:
    link = first_link(FEDERATION, Partition.of([NAMES[:3]]))
    silos = {name: Silo(party(name, NAMES[:3], link=link, approved=frozenset())) for name in NAMES[:3]}
    for number in range(1, rounds + 1):
        deal(silos, number)
    return silos


def deal(silos: dict[SiloName, Silo], number: int, *, heard_by: Sequence[SiloName] = NAMES) -> list[SharedKeys]:
    """What each deals in round `number`, of which those in `heard_by` are told."""
    for each in silos.values():
        if isinstance(each.state, silo_states.InAttempt):
            each.take(silo_events.AttemptEnded(each.state.attempt))
    of = attempt(round=number)
    link = next(iter(silos.values())).party.link
    assert link is not None
    members = [each.take(opening(f"{each.name}/{number}", of))[0] for each in silos.values()]
    parameters = terms_of(link=link).parameters(list(silos))
    roster = Roster(attempt=of, model=MODEL, link=link.digest, parameters=parameters, members=tuple(members))
    dealt = [each.take(roster)[0] for each in silos.values()]
    for each in (silos[name] for name in silos if name in heard_by):
        boxes = tuple(box for it in dealt for box in it.boxes if box.holder == each.name)
        each.take(
            Delivery(roster=roster.digest, holder=each.name, dealings=tuple(it.dealing for it in dealt), boxes=boxes)
        )
    return dealt


def test_attack_a_lost_folder_is_not_taken_for_a_new_silos() -> None:
    silos = group_of_three(2)
    silos[VICTIM] = Silo(silos[VICTIM].party)
    with pytest.raises(Forgotten, match=r"silo silo-01 and silo silo-02 saw keys of this silo"):
        deal(silos, 3)
    with pytest.raises(Forgotten):  # and however often it is asked
        deal(silos, 4)


def test_attack_attempts_that_come_to_nothing_do_not_make_up_for_what_was_forgotten() -> None:
    silos = group_of_three(1)
    before = disk_of(silos[VICTIM])
    for number in (2, 3, 4):
        deal(silos, number)
    silos[VICTIM] = before
    for number in range(5, 30):
        before.take(silo_events.AttemptEnded(before.state.attempt)) if isinstance(
            before.state, silo_states.InAttempt
        ) else None
        before.take(opening(f"{VICTIM}/{number}", attempt(round=number)))
    with pytest.raises(Forgotten):
        deal(silos, 30)


def test_silos_that_lost_nothing_go_on_whoever_was_away_for_how_long() -> None:
    silos = group_of_three(3)
    for number in range(4, 40):  # the victim is asked alone, and nobody hears of it
        each = silos[VICTIM]
        if isinstance(each.state, silo_states.InAttempt):
            each.take(silo_events.AttemptEnded(each.state.attempt))
        each.take(opening(f"{VICTIM}/{number}", attempt(round=number)))
    assert len(deal(silos, 40)) == 3
    for each in silos.values():
        each.restart()
    assert len(deal(silos, 41)) == 3


@pytest.mark.parametrize("heard_by", [NAMES, NAMES[1:], NAMES[:1]], ids=["all", "all but it", "it alone"])
def test_silos_that_lost_nothing_go_on_after_more_attempts_than_there_is_room_for(
    heard_by: Sequence[SiloName],
) -> None:
    """Of which its mate is in none: whatever the last was that the mate saw, this silo still knows of it."""
    silos = group_of_three(1)
    deal(silos, 2, heard_by=heard_by)
    for name, each in silos.items():
        silos[name] = Silo(each.party, state=silo_states.Resting(each.memory), memory=each.memory)
    victim = silos[VICTIM]
    memory = victim.memory
    for number in range(2 * MAX_ANNOUNCED):
        memory = memory.with_announced(number.to_bytes(32, "big"))
    silos[VICTIM] = Silo(victim.party, state=silo_states.Resting(memory), memory=memory)
    assert len(deal(silos, 3)) == 3
    assert len(deal(silos, 4)) == 3


def test_what_people_were_shown_is_known_from_then_on() -> None:
    silos = group_of_three(2)
    silos[VICTIM] = Silo(silos[VICTIM].party)
    with pytest.raises(Forgotten) as found:
        deal(silos, 3)
    each = silos[VICTIM]
    memory = each.memory.with_announced(*found.value.witnesses)
    silos[VICTIM] = Silo(each.party, state=silo_states.Resting(memory), memory=memory)
    assert len(deal(silos, 4)) == 3


def test_others_than_those_of_its_group_are_not_asked() -> None:
    """Who is summed with this silo can stop its sums as it is; nobody else can."""
    world = Schemer(0)
    stranger = NAMES[4]
    world.silos[VICTIM].memory = SiloMemory()
    world.round, world.id = 1, bytes(32)
    members = [world.advertised(name) for name in NAMES]
    lie = signed(replace(members[4], seen=((VICTIM, bytes(32)),)), identity_key(stranger))
    members[4] = lie
    roster = Roster(
        attempt=lie.attempt,
        model=MODEL,
        link=LINK.digest,
        parameters=terms_of(link=LINK).parameters(NAMES),
        members=tuple(member for member in members if member is not None),
    )
    dealt = [shared for name in NAMES for shared in world.share(name, roster, 0)]
    assert len(dealt) == len(NAMES) - 1  # who lied signed other keys than it made
    world.deliver(VICTIM, roster, dealt)
    assert dict(world.silos[VICTIM].memory.seen) == {it.silo: it.digest for it in roster.members[1:3]}


def test_a_silo_says_what_it_saw_of_those_of_its_group_alone() -> None:
    """Also where it saw others before the groups were changed."""
    memory = SiloMemory(seen=((NAMES[1], bytes(32)), (NAMES[4], bytes(32))))
    each = Silo(party(VICTIM, NAMES, link=LINK, approved=frozenset()), state=silo_states.Resting(memory), memory=memory)
    (advertised,) = each.take(opening(VICTIM, attempt()))
    assert advertised.seen == ((NAMES[1], bytes(32)),)


def test_a_memory_keeps_the_newest_of_its_own_keys_and_forgets_silos_that_left() -> None:
    memory = SiloMemory()
    digests = [number.to_bytes(32, "big") for number in range(MAX_ANNOUNCED + 5)]
    for digest in digests:
        memory = memory.with_announced(digest)
    assert memory.announced == tuple(digests[5:])
    assert memory.sequence == len(digests)
    seen = memory.with_seen({NAMES[1]: digests[0], NAMES[0]: digests[1]}, members=NAMES)
    assert [name for name, _ in seen.seen] == [NAMES[0], NAMES[1]]
    assert [name for name, _ in seen.with_seen({}, members=NAMES[1:]).seen] == [NAMES[1]]
    assert seen.with_seen({NAMES[1]: digests[0]}, members=NAMES) is seen


def kept(journal: Sequence[silo_events.Event]) -> tuple[silo_events.Event, ...]:
    """A copy of the file, whose root outlives the attempt."""
    return tuple(
        replace(event, root=Secret(event.root.buffer)) if isinstance(event, silo_events.OpenAttempt) else event
        for event in journal
    )


def not_followed(each: Silo, memory: SiloMemory, journal: Sequence[silo_events.Event], says: str) -> None:
    with pytest.raises(PolicyRefusal, match=says) as refusal:
        silo_resumption.restored(memory, kept(journal), each.party)
    assert refusal.value.rule == MASKING_MEMORY
    assert "forfeit the attempt" in str(refusal.value)


@pytest.mark.parametrize("after", [attempt(round=1, number=2), attempt(round=3)])
def test_attack_the_journal_of_an_attempt_that_is_over_put_back_beside_the_memory_of_today(after: Attempt) -> None:
    """It would let the silo sign a second set of that round, and show its shares once more."""
    federation = Federation(4).run(until="consistency check")
    each = federation.silos[federation.names[0]]
    copy = kept(each.journal)
    each.take(silo_events.AttemptEnded(federation.attempt))
    each.take(opening(each.name, after))
    not_followed(
        each, each.memory, copy, f"by its memory this silo came to attempt {after.number} of round {after.round}"
    )
    not_followed(each, SiloMemory(), copy, "this silo came to none of its plan")


def test_attack_the_journal_of_an_attempt_put_back_to_before_the_silo_answered_it() -> None:
    federation = Federation(4).run(until="consistency check")
    each = federation.silos[federation.names[0]]
    copies = [kept(each.journal[:count]) for count in range(1, len(each.journal) + 1)]
    federation.run()
    assert isinstance(each.state, silo_states.Revealed)
    for copy in copies[:-1]:
        not_followed(each, each.memory, copy, "by its memory this silo answered it")
    killed_before_the_request_was_journalled = kept(each.journal[:-1])
    state, _ = silo_resumption.restored(each.memory, killed_before_the_request_was_journalled, each.party)
    assert (type(state), state.memory) == (silo_states.Agreed, each.memory)


def test_attack_the_journal_of_keys_that_the_memory_does_not_have() -> None:
    """Of the same round and number, and of another id or another root."""
    each, other = (Silo(party(VICTIM, NAMES)) for _ in range(2))
    each.take(opening(VICTIM, attempt()))
    other.take(opening("another root", attempt()))
    not_followed(each, each.memory, other.journal, "the memory does not have the keys")


def test_a_memory_never_goes_back_whoever_asks_for_it() -> None:
    memory = SiloMemory().joined(attempt(round=2)).answered(attempt(round=2))
    for before in (attempt(round=1, number=9), attempt(round=2)):
        with pytest.raises(PolicyRefusal, match="no place to go back to") as refusal:
            memory.joined(before)
        assert refusal.value.rule == MASKING_MEMORY
    with pytest.raises(PolicyRefusal, match="no place to go back to"):
        memory.answered(attempt(round=1))
    assert memory.answered(attempt(round=2)) is memory


def test_what_one_step_remembers_is_one_change() -> None:
    """So that a kill between the files that count changes leaves them one apart, never more."""
    each = Silo(party(VICTIM, NAMES))
    for number in (1, 2):
        before = each.memory.sequence
        each.take(opening(VICTIM, attempt(number=number)))
        assert each.memory.sequence == before + 1
        each.take(silo_events.AttemptEnded(each.state.attempt))  # type: ignore[union-attr]
