"""Any sequence of events, possible or not: what must hold in every state, and over every transition."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lorica_coordinator.edges.database.state_json import STATE_VERSION, journal_of, state_from_json, state_to_json
from lorica_coordinator.rounds.effects import (
    Aggregate,
    ArmDeadline,
    DisarmDeadline,
    EvaluationAccepted,
    ModelMade,
    PlanBegun,
    RoundClosed,
    RoundOpened,
    UpdateAccepted,
)
from lorica_coordinator.rounds.events import (
    Aggregated,
    AggregationFailed,
    DeadlinePassed,
    Event,
    PlanOffered,
    PlanPaused,
    PlanResumed,
    PlanStarted,
    PlanStopped,
    ReadinessDeclared,
    Resumed,
    SiloLeft,
)
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.orders import order_for, waiting_for
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Evaluating,
    Finished,
    Gathering,
    Idle,
    State,
    course_of,
    deadline_of,
    population_of,
    round_of,
)
from lorica_coordinator.rounds.updates import Outcome
from lorica_security.errors import LoricaError
from silo_wire.messages import Evaluate, RoundKey, Train
from tests.support.rounds import (
    INITIAL,
    SIGNATURE,
    T0,
    A,
    B,
    C,
    aggregated,
    committed,
    declined,
    enrolled,
    key,
    model_after,
    ready,
    reported,
    revoked,
    terms,
)

SILOS = st.sampled_from([A, B, C])


class AnyHistory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state: State = Idle()
        self.now = T0
        self.armed: float | None = None
        self.counted: set[tuple[RoundKey, str]] = set()
        self.opened: set[RoundKey] = set()
        self.closed: set[int] = set()
        self.terms = terms()

    @initialize(
        min_silos=st.integers(1, 3),
        rounds=st.integers(1, 3),
        every=st.integers(0, 2),
        initial=st.booleans(),
        last=st.booleans(),
        silos=st.integers(1, 3),
        begun=st.sampled_from([True, True, True, False]),
    )
    def plan(self, min_silos: int, rounds: int, every: int, initial: bool, last: bool, silos: int, begun: bool) -> None:
        self.terms = terms(
            min_silos=min_silos, rounds=rounds, evaluate_every=every, evaluate_initial=initial, evaluate_last=last
        )
        for silo in (A, B, C)[:silos]:
            self.happen(enrolled(silo, self.now))
        if begun:
            self.starts()
            self.everyone_is_ready()

    def happen(self, event: Event) -> None:
        before = self.state
        try:
            after, effects = step(before, event)
        except LoricaError:
            assert self.state is before
            return
        assert sum(isinstance(effect, ArmDeadline | DisarmDeadline) for effect in effects) <= 1
        for effect in effects:
            match effect:
                case ArmDeadline(at=at):
                    self.armed = at
                case DisarmDeadline():
                    self.armed = None
                case RoundOpened():
                    assert isinstance(after, Collecting)
                    assert not after.course.paused
                    assert effect.key not in self.opened, "an attempt was opened twice"
                    assert len(effect.cohort) >= self.terms.min_silos
                    assert effect.key.round not in self.closed
                    self.opened.add(effect.key)
                case UpdateAccepted():
                    assert (effect.key, effect.update.silo) not in self.counted, "an update was counted twice"
                    self.counted.add((effect.key, effect.update.silo))
                case Aggregate():
                    assert len(effect.updates) >= self.terms.min_silos
                    assert list(effect.updates) == sorted(effect.updates, key=lambda item: item.silo)
                    assert all((effect.key, item.silo) in self.counted for item in effect.updates)
                case RoundClosed():
                    assert effect.key.round not in self.closed, "a round was closed twice"
                    self.closed.add(effect.key.round)
                case EvaluationAccepted():
                    assert effect.key.round in self.closed | {0}
        self._check_transition(before, event, after, effects)
        self.state = after

    def _check_transition(self, before: State, event: Event, after: State, effects: tuple[Any, ...]) -> None:
        old, new = course_of(before), course_of(after)
        if old is None or new is None:
            return
        assert round_of(after)[0] >= round_of(before)[0], "a round number fell"
        if isinstance(before, Finished):
            assert isinstance(after, Finished)
        if new.model != old.model:
            assert isinstance(event, Aggregated)
            assert any(isinstance(effect, ModelMade) and effect.model == new.model for effect in effects)
        assert not any(isinstance(effect, PlanBegun) for effect in effects)
        if isinstance(event, SiloLeft):
            for phase in (Collecting, Evaluating):
                if isinstance(before, phase):
                    assert isinstance(after, phase)
                    assert after.cohort == before.cohort

    # --- what honest silos and the clock do

    @rule(silo=SILOS)
    def enrols(self, silo: Any) -> None:
        self.happen(enrolled(silo, self.now))

    @rule(silo=SILOS, is_ready=st.booleans())
    def declares(self, silo: Any, is_ready: bool) -> None:
        self.happen(ReadinessDeclared(now=self.now, silo=silo, ready=is_ready))

    @rule()
    def everyone_is_ready(self) -> None:
        for silo in sorted(population_of(self.state)):
            self.happen(ready(silo, self.now))

    @rule(silo=SILOS)
    def leaves(self, silo: Any) -> None:
        self.happen(SiloLeft(now=self.now, silo=silo))

    @rule(silo=SILOS)
    def does_its_work(self, silo: Any) -> None:
        if isinstance(self.state, Collecting):
            self.happen(committed(silo, self.state.key, now=self.now))
        elif isinstance(self.state, Evaluating):
            self.happen(reported(silo, self.state.key, model=self.state.course.model, now=self.now))

    @rule(some=st.lists(SILOS, min_size=2, max_size=4))
    def several_do_their_work(self, some: Any) -> None:
        for silo in some:
            self.does_its_work(silo)

    @rule(silo=SILOS)
    def refuses_its_work(self, silo: Any) -> None:
        if isinstance(self.state, Collecting | Evaluating):
            self.happen(declined(silo, self.state.key, now=self.now))

    @rule(silo=SILOS)
    def is_revoked(self, silo: Any) -> None:
        self.happen(revoked(silo, self.now))
        assert silo not in population_of(self.state)
        assert not isinstance(order_for(self.state, silo, self.now), Train | Evaluate)

    @rule(pauses=st.booleans())
    def pauses_or_goes_on(self, pauses: bool) -> None:
        self.happen(PlanPaused(now=self.now) if pauses else PlanResumed(now=self.now))

    @rule(seconds=st.sampled_from([1.0, 59.0, 61.0, 601.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.armed is not None and self.now >= self.armed:
            self.happen(DeadlinePassed(now=self.now, deadline=self.armed))

    @rule(zero=st.booleans())
    def aggregation_ends(self, zero: bool) -> None:
        if isinstance(self.state, Aggregating):
            made = self.state.course.model if zero else model_after(self.state.round)
            self.happen(
                aggregated(
                    self.state.key,
                    model=made,
                    silos=tuple(item.silo for item in self.state.updates),
                    outcome=Outcome.ZERO_WEIGHT if zero else Outcome.APPLIED,
                    now=self.now,
                )
            )

    @rule(silo=SILOS)
    def aggregation_fails(self, silo: Any) -> None:
        if isinstance(self.state, Aggregating):
            self.happen(AggregationFailed(now=self.now, key=self.state.key, silo=silo, reason="damaged"))

    # --- what the operator and the machine room do

    @rule()
    def offered(self) -> None:
        self.happen(PlanOffered(now=self.now, terms=self.terms, model=INITIAL, signature=SIGNATURE))

    @rule()
    def starts(self) -> None:
        self.happen(PlanStarted(now=self.now, terms=self.terms, model=INITIAL, signature=SIGNATURE))

    @rule()
    def stops(self) -> None:
        self.happen(PlanStopped(now=self.now))

    @rule(down=st.sampled_from([0.5, 700.0]))
    def restarts(self, down: float) -> None:
        text = state_to_json(self.state, now=self.now)
        self.now += down
        kept = {"version": STATE_VERSION, "phase": self.state.phase, "text": text, "journal": journal_of(self.state)}
        self.state = state_from_json(**kept, where="here", now=self.now)
        self.armed = None
        self.happen(Resumed(now=self.now, population=population_of(self.state)))

    # --- strays

    @rule(silo=SILOS, round_number=st.integers(0, 3), attempt=st.integers(1, 3), other=st.booleans())
    def a_stray_message(self, silo: Any, round_number: int, attempt: int, other: bool) -> None:
        stray = key(round_number, attempt)
        content = "another" if other else "update"
        self.happen(committed(silo, stray, now=self.now, content=content))
        self.happen(reported(silo, stray, now=self.now))
        self.happen(DeadlinePassed(now=self.now, deadline=T0 + round_number))
        if not isinstance(self.state, Aggregating):
            self.happen(aggregated(stray, now=self.now))

    # --- what holds always

    @invariant()
    def the_armed_deadline_is_the_one_of_the_phase(self) -> None:
        assert self.armed == deadline_of(self.state)
        if isinstance(self.state, Collecting | Evaluating):
            assert self.armed is not None

    @invariant()
    def ready_silos_are_enrolled(self) -> None:
        course = course_of(self.state)
        if course is not None:
            assert course.ready <= course.population

    @invariant()
    def an_open_round_can_still_reach_its_quorum(self) -> None:
        if isinstance(self.state, Collecting):
            possible = len(self.state.cohort) - len(self.state.declined)
            assert possible >= self.terms.min_silos
            assert len(self.state.updates) < possible, "everyone has settled and the phase goes on"
        if isinstance(self.state, Gathering) and self.state.started:
            quorum = len(self.state.course.ready) >= self.terms.min_silos
            assert (self.state.deadline is not None) == (quorum and not self.state.course.paused)

    @invariant()
    def every_silo_has_an_order_and_trains_only_in_the_cohort(self) -> None:
        assert waiting_for(self.state)
        for silo in (A, B, C):
            order = order_for(self.state, silo, self.now)
            if isinstance(order, Train):
                assert isinstance(self.state, Collecting)
                assert silo in self.state.cohort


AnyHistory.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestAnyHistory = AnyHistory.TestCase
