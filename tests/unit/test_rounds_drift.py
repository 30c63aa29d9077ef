"""Who goes on with a correction of drift: a search over silos that are away, late, refused, lost or that decline, of
which some cohort's corrections might not sum to zero."""

from dataclasses import dataclass, field
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.database.state_json import STATE_VERSION, state_from_json, state_to_json
from lorica_coordinator.rounds.events import AggregationFailed, DeadlinePassed, Event, Resumed, SiloLeft
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.orders import order_for
from lorica_coordinator.rounds.states import Aggregating, Collecting, Gathering, Idle, State
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey, Train
from tests.support.rounds import T0, aggregated, committed, declined, enrolled, ready, started, update

SILOS = tuple(SiloName(f"silo-{letter}") for letter in "abcd")
RATE, WORK = Fraction(3, 4), Fraction(2)
"""Of the server, and steps times rate of the silos."""


@dataclass
class Silo:
    """What silo_wire/drift_correction.py says, in exact numbers, of a model of one parameter. `own` is the oracle's
    c_i."""

    states: dict[Digest, Fraction] = field(default_factory=dict)
    own: Fraction = Fraction(0)
    correction: Fraction = Fraction(0)
    delta: Fraction = Fraction(0)

    def train(self, model: Fraction, included: Digest | None, gradients: int, left: Digest) -> None:
        """`gradients` is what the steps come to without a correction; `left` is the update that this makes."""
        before = model if included is None else self.states[included]
        self.correction = (before - model) / (RATE * WORK)
        self.delta = gradients - WORK * self.correction
        self.states = {digest: self.states[digest] for digest in self.states if digest == included}
        self.states[left] = before + RATE * self.delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """What happens to one attempt: of its silos some are away, late, decline, are refused, or have lost what they kept.
    `stay_away`: who is missing in the last sum is not there now."""

    troubles: frozenset[tuple[str, SiloName]] = frozenset()
    gradients: tuple[int, ...] = (1, 2, 3, 4)
    stay_away: bool = False
    restart: bool = False

    def of(self, trouble: str) -> set[SiloName]:
        return {silo for what, silo in self.troubles if what == trouble}


TROUBLES = st.tuples(st.sampled_from(("away", "late", "declines", "refused", "loses")), st.sampled_from(SILOS))
PLAYS = st.builds(
    Play,
    troubles=st.just(frozenset()) | st.frozensets(TROUBLES, min_size=1, max_size=3),
    gradients=st.tuples(*[st.integers(-9, 9)] * 4),
    stay_away=st.booleans(),
    restart=st.booleans(),
)


class Federation:
    def __init__(self) -> None:
        self.state: State = Idle()
        self.model = Fraction(0)
        self.silos = {name: Silo() for name in SILOS}
        self.server = Fraction(0)
        """The oracle's c."""
        self.went_on = 0
        self.missing: set[SiloName] = set()
        """In the last sum, of its cohort."""

    def happen(self, *events: Event) -> None:
        for event in events:
            self.state, _ = step(self.state, event)

    def collecting(self, away: set[SiloName]) -> Collecting | None:
        """The next attempt, without those who are away. Nobody stays connected, so that the one after gathers too."""
        assert isinstance(self.state, Gathering)
        for silo in SILOS:
            if silo not in away and isinstance(self.state, Gathering):
                self.happen(ready(silo))
        if isinstance(self.state, Gathering) and self.state.deadline is not None:
            self.happen(DeadlinePassed(now=self.state.deadline, deadline=self.state.deadline))
        if not isinstance(self.state, Collecting):
            return None
        begun = self.state
        self.happen(*(SiloLeft(now=T0, silo=silo) for silo in SILOS))
        return begun

    def restart(self) -> None:
        text = state_to_json(self.state, now=T0)
        back = state_from_json(version=STATE_VERSION, phase=self.state.phase, text=text, where="here", now=T0)
        self.state = back
        self.happen(Resumed(now=T0, population=frozenset(SILOS)))

    def attempt(self, play: Play) -> None:
        declines = play.of("declines")
        begun = self.collecting(play.of("away") | (self.missing if play.stay_away else set()))
        if begun is None:
            return
        orders = {silo: order_for(begun, silo, T0) for silo in begun.cohort}
        if play.restart:
            self.restart()
            assert isinstance(self.state, Collecting)
            again = {silo: order_for(self.state, silo, T0) for silo in begun.cohort}
            assert {silo: it.included_update for silo, it in again.items() if isinstance(it, Train)} == {
                silo: it.included_update for silo, it in orders.items() if isinstance(it, Train)
            }, "what was begun is gone on with"
        gradients = dict(zip(SILOS, play.gradients, strict=True))
        told = {silo: order.included_update for silo, order in orders.items() if isinstance(order, Train)}
        assert set(told) == set(begun.cohort)
        assert None not in told.values() or set(told.values()) == {None}, "some go on and some begin anew"
        anew = None in told.values()
        for silo in play.of("loses") & set(told):
            self.silos[silo].states.clear()
            if not anew:
                declines.add(silo)
        if anew:
            self.server = Fraction(0)
            for silo in self.silos.values():
                silo.own = Fraction(0)
        self.went_on += not anew
        for silo in begun.cohort:
            if silo in declines:
                continue
            self.silos[silo].train(self.model, told[silo], gradients[silo], self.digest(silo, begun.key))
        if not declines & set(begun.cohort):
            assert sum(self.silos[silo].correction for silo in begun.cohort) == 0
            for silo in begun.cohort:
                assert self.silos[silo].correction == self.server - self.silos[silo].own, "not the oracle's"
        self.answers(begun, play.of("late"), declines)
        if isinstance(self.state, Aggregating):
            self.sums(begun, play.of("refused"))

    def answers(self, begun: Collecting, late: set[SiloName], declines: set[SiloName]) -> None:
        for silo in begun.cohort:
            if not isinstance(self.state, Collecting):
                return
            if silo in declines:
                self.happen(declined(silo, begun.key))
            elif silo not in late:
                self.happen(committed(silo, begun.key, content=str(begun.key)))
        if isinstance(self.state, Collecting):
            self.happen(DeadlinePassed(now=self.state.deadline, deadline=self.state.deadline))

    def sums(self, begun: Collecting, refused: set[SiloName]) -> None:
        for silo in sorted(refused):
            if isinstance(self.state, Aggregating) and silo in self.state.silos:
                self.happen(AggregationFailed(now=T0, key=begun.key, silo=silo, reason="not finite"))
        if not isinstance(self.state, Aggregating):
            return
        summed = [self.silos[silo] for silo in self.state.silos]
        self.missing = set(begun.cohort) - set(self.state.silos)
        self.happen(aggregated(begun.key, silos=self.state.silos))
        mean = sum((silo.delta for silo in summed), Fraction(0)) / len(summed)
        self.model += RATE * mean
        changes = []
        for silo in summed:
            after = silo.own - self.server - silo.delta / WORK
            changes.append(after - silo.own)
            silo.own = after
        self.server += sum(changes, Fraction(0)) / len(changes)

    def digest(self, silo: SiloName, key: RoundKey) -> Digest:
        return update(silo, content=str(key)).digest


def federation() -> Federation:
    it = Federation()
    it.happen(*(enrolled(silo) for silo in SILOS))
    it.happen(started(corrects_drift=True, rounds=50, evaluate_every=0, evaluate_last=False))
    return it


@settings(max_examples=200, deadline=None)
@given(st.lists(PLAYS, min_size=3, max_size=8))
def test_attack_no_silo_that_is_missing_leaves_corrections_that_do_not_sum_to_zero(plays: list[Play]) -> None:
    it = federation()
    for play in plays:
        it.attempt(play)


A = SILOS[0]
ALL = Play()


def lacking(trouble: str, *silos: SiloName, **more: bool) -> Play:
    return Play(troubles=frozenset((trouble, silo) for silo in silos or (A,)), **more)


def went_on(*plays: Play) -> list[bool]:
    it, found = federation(), []
    for play in plays:
        before = it.went_on
        it.attempt(play)
        found.append(it.went_on > before)
    return found


def test_silos_go_on_while_all_of_them_take_part_and_through_a_restart() -> None:
    assert went_on(ALL, ALL, Play(restart=True), ALL) == [False, True, True, True]


def test_whoever_is_missing_or_new_has_every_silo_begin_anew() -> None:
    assert went_on(ALL, lacking("late"), ALL, ALL) == [False, True, False, True]
    assert went_on(ALL, lacking("refused"), ALL, ALL) == [False, True, False, True]
    away = lacking("away")
    assert went_on(ALL, away, away, ALL, ALL) == [False, False, True, False, True]


def test_attack_who_is_late_and_stays_away_takes_its_correction_with_it() -> None:
    """The cohort is then those who were summed, whose corrections alone are not zero in sum."""
    assert went_on(ALL, lacking("late"), lacking("away"), lacking("away")) == [False, True, False, True]


def test_a_state_that_is_lost_costs_one_round_or_attempt_without_corrections() -> None:
    """With the quorum that is left the round goes on, and the next begins anew; below it, the next attempt does."""
    assert went_on(ALL, lacking("loses"), ALL, ALL) == [False, True, False, True]
    below = lacking("away", *SILOS[2:])
    loses = Play(troubles=below.troubles | lacking("loses").troubles)
    assert went_on(below, loses, below, below) == [False, True, False, True]
