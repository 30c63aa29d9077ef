"""All that a hostile coordinator can bring one silo to, state by state, by breadth first, against the real silo
machine.

The coordinator holds everything that silos ever sent in some rounds of some plans: each attempt's rosters, deliveries,
survivor sets and unmask requests, with others that do not fit. At each step it delivers any of these, of any attempt,
or ends one; the silo's process dies after any effect of a step, or at rest, and starts again from memory and journal;
in a world with snapshots, what lay on its disk at one time is put back later. All are taken from each state that was
reached, and two states are one if memory, journal and what the coordinator learnt are the same.

Roots and encapsulations are the same whenever an attempt is opened. The coordinator gains by that: what it kept still
fits.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from lorica_security.errors import LoricaError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.messages import (
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
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import resumption as silo_resumption
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from lorica_security.secure_aggregation.silo.phases import own_dealing as silo_own_dealing
from tests.support.secagg_federation import (
    Silo,
    alone,
    attempt,
    encapsulate_of,
    entropy,
    identity_key,
    opening,
    party,
    silo_names,
    terms,
)

COUNT, COLLUDERS, THRESHOLD = 4, 1, 3
LINK = alone(silo_names(COUNT), colluders=COLLUDERS)
NAMES = silo_names(COUNT)
VICTIM, *PEERS = NAMES
PLANS = (bytes(31) + b"\x01", bytes(31) + b"\x02")

When = tuple[int, int, int]  # plan, round, number
Label = tuple[Any, ...]  # (when, kind, ...), of an event
Fact = tuple[
    Any, ...
]  # what the coordinator learnt: ("signed" | "masked" | "revealed", when, digest), ("share", when, dealer, kind)


@dataclass
class Pool:
    """Everything that the coordinator can deliver, by label, and of which attempt each roster is.

    `size` is "full"; "lean": one roster and one delivery of each attempt, all sets and requests of three; or "bare":
    two sets, a request for each.
    """

    plans: int
    rounds: int
    attempts: int
    size: str = "full"
    events: dict[Label, silo_events.Event] = field(default_factory=dict)
    label_of: dict[object, Label] = field(default_factory=dict)
    when_of: dict[bytes, When] = field(default_factory=dict)
    signers: dict[Label, tuple[SiloName, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        demands = silo_party.Demands(colluders=COLLUDERS)
        self.party = party(VICTIM, NAMES, demands=demands, link=LINK)
        self.parties = {name: party(name, NAMES, demands=demands, link=LINK) for name in NAMES}
        self.own: dict[bytes, silo_events.Event] = {}
        for plan in range(self.plans):
            for round_ in range(1, self.rounds + 1):
                for number in range(1, self.attempts + 1):
                    self._fill((plan, round_, number))

    @property
    def full(self) -> bool:
        return self.size == "full"

    def _add(self, event: silo_events.Event, *label: Any) -> None:
        self.events[label] = event
        self.label_of[_name(event)] = label

    def label(self, event: silo_events.Event) -> Any:
        return self.label_of[_name(event)]

    def _fill(self, when: When) -> None:
        of = attempt(round=when[1], number=when[2], plan=PLANS[when[0]], salt=f"explored/{when[0]}")
        self._add(opening(VICTIM, of), when, "open")
        self._add(silo_events.AttemptEnded(of), when, "end")
        self._fill_roster(when, of, NAMES, "all")
        if self.full:
            self._fill_roster(when, of, NAMES[:-1], "three")

    def _fill_roster(self, when: When, of: Attempt, members: tuple[SiloName, ...], name: str) -> None:
        silos = {it: Silo(self.parties[it]) for it in members}
        keys = tuple(message for it in members for message in silos[it].take(opening(it, of)))
        offered = terms(link=LINK, colluders=COLLUDERS)
        roster = Roster(
            attempt=of,
            model=offered.model,
            link=offered.link.digest,
            parameters=offered.parameters(members),
            members=keys,
        )
        assert roster.parameters.threshold == THRESHOLD
        self.when_of[roster.digest] = when
        self._add(roster, when, "roster", name)
        if self.full:
            self._add(replace(roster, model=entropy("another model")), when, "roster", name, "another model")
        shared: dict[SiloName, SharedKeys] = {}
        for it in members:
            (shared[it],) = silos[it].take(roster)
        for dealers in (members, *([NAMES[:-1]] if len(members) > 3 and self.full else [])):
            dealings = tuple(shared[it].dealing for it in dealers)
            boxes = tuple(box for it in dealers for box in shared[it].boxes if box.holder == VICTIM)
            delivery = Delivery(roster=roster.digest, holder=VICTIM, dealings=dealings, boxes=boxes)
            about = (name, f"{len(dealers)} dealt")
            self._add(delivery, when, "delivery", *about)
            for survivors in (dealers, *combinations(dealers, 3)) if len(dealers) > 3 else (dealers,):
                if self.size == "bare" and survivors not in (NAMES, NAMES[:-1]):
                    continue
                self._fill_set(when, roster, dealings_digest(dealings), survivors, about)

    def _fill_set(
        self, when: When, roster: Roster, dealings: bytes, survivors: tuple[SiloName, ...], about: tuple[str, ...]
    ) -> None:
        inputs = tuple(vector_of(it, dealings) for it in survivors)
        chosen = SurvivorSet(roster=roster.digest, dealings=dealings, silos=survivors, inputs=inputs)
        about = (*about, ",".join(it[-2:] for it in survivors))
        self._add(chosen, when, "set", *about)
        if VICTIM in survivors and self.full:
            swapped = replace(chosen, inputs=(entropy("another vector"), *inputs[1:]))
            self._add(swapped, when, "set", *about, "swapped")
        words = {
            it: signed(Agreement(roster=roster.digest, silo=it, survivors=chosen.digest), identity_key(it))
            for it in roster.silos
        }
        peers = [it for it in roster.silos if it != VICTIM]
        pairs = list(combinations(peers, 2))
        for asked in (*(pairs[:1] if self.size == "bare" else pairs), *([tuple(peers[:1])] if self.full else [])):
            label = (when, "request", *about, ",".join(it[-2:] for it in asked))
            agreements = tuple(words[it] for it in (VICTIM, *asked))
            self._add(UnmaskRequest(roster=roster.digest, agreements=agreements), *label)
            self.signers[label] = asked

    def shared(self, state: silo_states.Sharing) -> silo_events.Event:
        """What the silo deals, made once for each roster."""
        key = state.roster.digest
        if key not in self.own:
            self.own[key] = silo_own_dealing.shared_keys(state, self.party, encapsulate_of(VICTIM))
            self.label_of[_name(self.own[key])] = (self.when_of[key], "shared", key)
        return self.own[key]

    def masked(self, state: silo_states.Masking) -> silo_events.Event:
        key = state.delivery.dealings_digest
        if key not in self.own:
            self.own[key] = silo_events.VectorMasked(vector_of(VICTIM, key))
            self.label_of[_name(self.own[key])] = (self.when_of[state.roster.digest], "masked", key)
        return self.own[key]


def _name(event: silo_events.Event) -> object:
    """The machine journals what it was brought, but for an opening, which it completes."""
    return event.attempt.digest if isinstance(event, silo_events.OpenAttempt) else id(event)


def vector_of(name: SiloName, dealings: bytes) -> bytes:
    """Masks are fixed by who dealt what, and so is what is masked with them."""
    return entropy("vector", name, dealings.hex())


@dataclass(frozen=True, eq=False)
class Node:
    """A silo: the state in its process, and memory and journal on its disk; equal by `key`."""

    state: silo_states.State
    memory: SiloMemory
    journal: tuple[silo_events.Event, ...]
    key: tuple[Any, ...]

    def __str__(self) -> str:
        held = ", ".join(
            f"plan {plan.plan[-1]}: round {plan.round} attempt {plan.number}{' answered' * plan.answered}"
            for plan in self.memory.plans
        )
        return f"{self.key[0]} with {[label[:2] for label in self.key[3]]} and memory ({held})"


Moved = tuple[Label, Node, tuple[Any, ...]]  # what was done, the silo after it, what it sent


@dataclass(frozen=True)
class Reached:
    """`learnt` is what the coordinator has; `snapshot` a disk that was kept, `restored` how often one was put back.

    `promised` are the survivor sets that honest peers signed, by their labels: (attempt, peer, set).
    """

    node: Node
    learnt: frozenset[Fact]
    snapshot: Node | None = None
    restored: int = 0
    promised: frozenset[tuple[Any, ...]] = frozenset()

    @property
    def key(self) -> tuple[Any, ...]:
        kept = self.snapshot.key if self.snapshot is not None else None
        return self.node.key, self.learnt, kept, self.restored, self.promised


class Broken(AssertionError):
    """A state was reached that must not be; says by which steps."""


Check = Callable[["Exploration", Reached], str | None]


@dataclass
class Exploration:
    """`restores`: how often the snapshot may be put back. `honest_peers`: each of them signs one set of an attempt.

    `watched` is a plan and a round of which all that the coordinator learns is kept; None: all. Every rule is of one
    round."""

    pool: Pool
    restores: int = 0
    honest_peers: bool = False
    watched: tuple[int, int] | None = None
    nodes: dict[tuple[Any, ...], Node] = field(default_factory=dict)
    moves: dict[tuple[Any, ...], list[Moved]] = field(default_factory=dict)
    restarts: dict[tuple[Any, ...], tuple[Node, tuple[Any, ...]]] = field(default_factory=dict)
    answers: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    seen: dict[tuple[Any, ...], tuple[tuple[Any, ...] | None, Label]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    # ---- the real machine -------------------------------------------------------------------------------------------

    def node(self, state: silo_states.State, memory: SiloMemory, journal: tuple[silo_events.Event, ...]) -> Node:
        """`sequence` only numbers the changes of a memory: no rule of the machine reads it."""
        labels = tuple(self.pool.label(event) for event in journal)
        key = (type(state).__name__, frozenset(state.memory.plans), frozenset(memory.plans), labels)
        if key not in self.nodes:
            self.nodes[key] = Node(state, memory, journal, key)
        return self.nodes[key]

    def restart(self, memory: SiloMemory, journal: tuple[silo_events.Event, ...]) -> tuple[Node, tuple[Any, ...]]:
        """From what is on the disk alone, hence once for each disk."""
        disk = frozenset(memory.plans), tuple(self.pool.label(event) for event in journal)
        if disk not in self.restarts:
            state, effects = silo_resumption.restored(memory, journal, self.pool.party)
            self.restarts[disk] = self._done(self.node(state, memory, journal), state, effects, len(effects))
        return self.restarts[disk]

    def _done(
        self, before: Node, state: silo_states.State, effects: tuple[silo_effects.Effect, ...], count: int
    ) -> tuple[Node, tuple[Any, ...]]:
        """The first `count` effects; roots stay, since other states that are looked at still have them."""
        memory, journal, sent = before.memory, before.journal, []
        for effect in effects[:count]:
            match effect:
                case silo_effects.Remember():
                    memory = effect.memory
                case silo_effects.Journal():
                    journal = (*journal, effect.event)
                case silo_effects.Erase():
                    journal = ()
                case silo_effects.Send():
                    sent.append(effect.message)
        for effect in effects:
            if isinstance(effect, silo_effects.MaskVector):
                effect.erase()
        if count < len(effects):
            node, again = self.restart(memory, journal)
            return node, (*sent, *again)
        return self.node(state, memory, journal), tuple(sent)

    def of_node(self, node: Node) -> list[Moved]:
        """All that can be done to this silo, with what comes of it; what is refused comes to nothing."""
        if node.key in self.moves:
            return self.moves[node.key]
        found: dict[tuple[Any, ...], Moved] = {}
        before = repr((node.state, node.memory))
        for label, event in self._offered(node):
            try:
                state, effects = silo_machine.step(node.state, event, self.pool.party)
            except LoricaError as error:
                self.refusals[type(error).__name__] += 1
                continue
            for count in range(len(effects), -1, -1):
                after, sent = self._done(node, state, effects, count)
                what = label if count == len(effects) else (*label, f"killed after {count} effects")
                found.setdefault((after.key, _identity(sent)), (what, after, sent))
                if count == len(effects):
                    self._same_answer(after, sent, what)
        if repr((node.state, node.memory)) != before:
            raise Broken(f"what was brought to it changed {node} itself")
        after, sent = self.restart(node.memory, node.journal)
        if not same(after, node):
            raise Broken(f"a restart leads from {node} to {after}")
        self._same_answer(after, sent, ("restart",))
        found.setdefault((after.key, _identity(sent)), (("restart",), after, sent))
        self.moves[node.key] = list(found.values())
        return self.moves[node.key]

    def _offered(self, node: Node) -> Iterator[tuple[Label, silo_events.Event]]:
        yield from self.pool.events.items()
        if type(node.state) in (silo_states.Sharing, silo_states.Dealt):
            event = self.pool.shared(node.state)  # type: ignore[arg-type]
            yield self.pool.label(event), event
        if type(node.state) in (silo_states.Masking, silo_states.Masked):
            event = self.pool.masked(node.state)  # type: ignore[arg-type]
            yield self.pool.label(event), event

    def _same_answer(self, node: Node, sent: tuple[Any, ...], what: Label) -> None:
        """Whatever is sent with the same journal is the same, the first time, again and after a restart."""
        if not sent or not node.journal:
            return
        first = self.answers.setdefault(node.key[3], sent)
        if first != sent:
            raise Broken(f"{what} is answered by something else than before: {node}")

    # ---- what the coordinator does ----------------------------------------------------------------------------------

    def following(self, at: Reached) -> Iterator[tuple[Label, Reached]]:
        for label, node, sent in self.of_node(at.node):
            promised: frozenset[tuple[Any, ...]] | None = at.promised
            if self.honest_peers and label in self.pool.signers:
                promised = self._promised(at.promised, label)
            if promised is None:
                continue
            yield label, replace(at, node=node, learnt=at.learnt | self.facts(sent, node), promised=promised)
        if self.restores and at.snapshot is None:
            yield ("keep a snapshot",), replace(at, snapshot=at.node)
        if at.snapshot is not None and at.restored < self.restores:
            node, sent = self.restart(at.snapshot.memory, at.snapshot.journal)
            yield (
                ("put the snapshot back",),
                replace(at, node=node, learnt=at.learnt | self.facts(sent, node), restored=at.restored + 1),
            )

    def _promised(self, promised: frozenset[tuple[Any, ...]], request: Label) -> frozenset[tuple[Any, ...]] | None:
        """With those whose signatures are in `request`; None: one of them signed another set of that attempt."""
        when, chosen = request[0], request[2:-1]
        signers = self.pool.signers[request]
        if any(it[0] == when and it[1] in signers and it[2] != chosen for it in promised):
            return None
        return promised | {(when, peer, chosen) for peer in signers}

    def facts(self, sent: tuple[Any, ...], node: Node) -> frozenset[Fact]:
        out: set[Fact] = set()
        for message in sent:
            match message:
                case MaskedInput():
                    out.add(("masked", self.pool.when_of[message.roster], message.dealings + message.vector))
                case Agreement():
                    out.add(("signed", self.pool.when_of[message.roster], message.survivors))
                case Reveal():
                    when = self.pool.when_of[message.roster]
                    asked = next(event for event in node.journal if isinstance(event, SurvivorSet))
                    request = next((event for event in node.journal if isinstance(event, UnmaskRequest)), None)
                    if request is None:
                        raise Broken(f"shares were revealed before the request was written down: {node}")
                    if len(request.agreements) < THRESHOLD:
                        raise Broken(f"shares were revealed for fewer than {THRESHOLD} signatures: {node}")
                    out.add(("revealed", when, asked.digest))
                    for share in message.shares:
                        kind = "self mask" if isinstance(share, SelfMaskShare) else "mask key"
                        out.add(("share", when, share.dealer, kind))
        return frozenset(fact for fact in out if self.watched in (None, fact[1][:2]))

    # ---- all of it --------------------------------------------------------------------------------------------------

    def run(self, check: Check, most: int = 10**7) -> "Exploration":
        """Until nothing new comes. Raises Broken with the shortest way to a state in which `check` finds something
        wrong."""
        start, _ = self.restart(SiloMemory(), ())
        first = Reached(start, frozenset())
        self.seen[first.key] = (None, ("start",))
        waiting = deque([first])
        while waiting:
            at = waiting.popleft()
            self.kinds[type(at.node.state).__name__] += 1
            wrong = check(self, at)
            if wrong is not None:
                raise Broken(f"{wrong}, by {self.way(at)}")
            for label, after in self.following(at):
                if after.key not in self.seen:
                    self.seen[after.key] = (at.key, label)
                    waiting.append(after)
            assert len(self.seen) <= most, "the states have no end: is something in the key that counts steps?"
        return self

    def way(self, at: Reached) -> str:
        steps: list[str] = []
        key = at.key
        while True:
            before, label = self.seen[key]
            if before is None:
                return " -> ".join(reversed(steps))
            steps.append(" ".join(str(part) if not isinstance(part, bytes) else part.hex()[:8] for part in label))
            key = before


def _identity(sent: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tells answers apart; all of them are signed, but for shared keys, which stand for their dealing."""
    return tuple(
        (type(it).__name__, it.dealing.signature if isinstance(it, SharedKeys) else it.signature) for it in sent
    )


def same(one: Node, other: Node) -> bool:
    """But for the memory in the process, which `_forgotten` looks at."""
    return (type(one.state), one.key[2:]) == (type(other.state), other.key[2:]) and (
        _without_memory(one.state) == _without_memory(other.state)
    )


def _without_memory(state: silo_states.State) -> silo_states.State:
    return replace(state, memory=SiloMemory())


def own_promises_broken(exploration: Exploration, at: Reached) -> str | None:
    """What a silo keeps by itself, and that it remembers what this takes."""
    return told_too_much(exploration, at) or _forgotten(at)


def told_too_much(exploration: Exploration, at: Reached) -> str | None:
    """What a silo keeps by itself, whatever all others do, as long as nobody puts its disk back."""
    by: dict[tuple[str, When], set[Any]] = {}
    for fact in at.learnt:
        if fact[0] != "share":
            by.setdefault((fact[0], fact[1]), set()).add(fact[2])
    for (what, when), values in by.items():
        if len(values) > 1:
            return f"{len(values)} different things were {what} in attempt {when}"
    for fact in at.learnt:
        if fact[0] == "share" and fact[3] == "self mask" and (*fact[:3], "mask key") in at.learnt:
            return f"both shares of {fact[2]} were revealed in attempt {fact[1]}"
    rounds = Counter(when[:2] for what, when in by if what == "revealed")
    for round_, count in rounds.items():
        if count > 1:
            return f"shares were revealed in {count} attempts of round {round_}"
    for what, when in by:
        later = [other for kind, other in by if kind == "masked" and other[:2] == when[:2] and other[2] > when[2]]
        if what == "revealed" and later:
            return f"the delta of attempt {when}, which was unmasked, was masked again in {later[0]}"
    return None


def _forgotten(at: Reached) -> str | None:
    """What process and disk remember is one thing, but for `answered` where the silo died before it revealed
    anything."""
    for held in (*at.node.memory.plans, *at.node.state.memory.plans):
        live, durable = at.node.state.memory.of(held.plan), at.node.memory.of(held.plan)
        if live is None or durable is None or replace(live, answered=durable.answered) != durable:
            return f"the process remembers {live}, the disk {durable}"
        when = PLANS.index(held.plan), held.round, held.number
        if not (live.answered and durable.answered) and any(fact[:2] == ("revealed", when) for fact in at.learnt):
            return f"shares were revealed in attempt {when}, and it is not remembered"
    return None


def restored_promises_broken(exploration: Exploration, at: Reached) -> str | None:
    """What holds of a silo whose disk was put back, since its peers sign one set of an attempt."""
    for fact in at.learnt:
        if fact[0] == "share" and fact[3] == "self mask" and (*fact[:3], "mask key") in at.learnt:
            return f"both shares of {fact[2]} were revealed in attempt {fact[1]}"
    for when in {fact[1] for fact in at.learnt if fact[0] == "revealed"}:
        if len([fact for fact in at.learnt if fact[:2] == ("revealed", when)]) > 1:
            return f"shares were revealed for two survivor sets of attempt {when}"
    return None
