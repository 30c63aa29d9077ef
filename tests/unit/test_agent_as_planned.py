"""Whatever a coordinator orders, a silo answers what its plan has and no more: rounds, times of scores, one model for
each.

The other side chooses rounds, attempts, models, kinds and order of orders, and when the agent is restarted; the plan is
drawn too.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from silo_agent.rounds.as_planned import AsPlanned
from silo_agent.rounds.effects import (
    DeclareTrained,
    Decline,
    Effect,
    FetchModel,
    JournalRoundModel,
    RecordRefusal,
    ReportEvaluation,
    RunEvaluation,
    RunTraining,
    UploadUpdate,
)
from silo_agent.rounds.events import (
    Evaluated,
    EvaluationDelivered,
    Event,
    ModelFetched,
    SavedUpdate,
    Trained,
    Uploaded,
    WorkFailed,
)
from silo_agent.rounds.machine import step
from silo_agent.rounds.states import FAILURES_IN_A_ROW, Agent, Ready
from silo_wire.canonical import Digest, digest_of
from silo_wire.manifest import Manifest
from silo_wire.messages import (
    DeclineReason,
    Evaluate,
    Evaluation,
    RoundKey,
    Standby,
    StandbyReason,
    Train,
    TrainingSummary,
)
from silo_wire.plans.sections.who_trains import EVERYBODY, WhoTrains
from silo_wire.plans.timetable import Timetable

PLAN = Digest("a1" * 32)
GATHERING = Standby(StandbyReason.GATHERING)
SUMMARY = TrainingSummary(
    examples=5, loss_max=2.0, loss_min=1.0, loss_first=2.0, loss_last=1.0, optimizer_steps=4, seconds=1.5
)
EVALUATION = Evaluation(
    split="dev", examples=4, exact_matches=2, executed=4, execution_matches=3, loss_per_token=0.5, seconds=1.0
)
MODELS = [digest_of(f"model {number}".encode()) for number in range(3)]


def timetables() -> st.SearchStrategy[Timetable]:
    return st.builds(
        Timetable,
        rounds=st.integers(1, 4),
        every=st.integers(0, 5),
        initial=st.booleans(),
        last=st.booleans(),
        masked=st.booleans(),
    )


def orders() -> st.SearchStrategy[Train | Evaluate]:
    keys = st.builds(
        RoundKey, federation=st.just("care"), plan=st.just(PLAN), round=st.integers(0, 7), attempt=st.integers(1, 3)
    )
    return st.one_of(
        st.builds(kind, key=keys, model=st.sampled_from(MODELS), seconds_left=st.just(60.0))
        for kind in (Train, Evaluate)
    )


RESTART = "restart"
WITHOUT, WITH = (WhoTrains(unlabelled=(name,), labelled_alone="in_turn") for name in ("ward-*", "lab"))
WHO = (EVERYBODY, WITHOUT, WITH)
"""The silo, ward-1, has rounds of all kinds, those without labels, or those with."""


@dataclass
class Silo:
    """The machine with a worker that does whatever it is asked, and a disk."""

    allows: AsPlanned
    disk: dict[tuple[Digest, int], Digest] = field(default_factory=dict)
    trained: list[Train] = field(default_factory=list)
    scored: list[Evaluate] = field(default_factory=list)
    declined: list[Decline] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.agent = Agent(phase=Ready(PLAN), prepared=PLAN, allows=self.allows, models=dict(self.disk))

    def take(self, event: Event) -> None:
        self.agent, effects = step(self.agent, event)
        for effect in effects:
            self.do(effect)

    def do(self, effect: Effect) -> None:
        match effect:
            case JournalRoundModel(plan=plan, round=number, model=model):
                self.disk.setdefault((plan, number), model)
            case FetchModel(order):
                self.take(ModelFetched(order.model))  # type: ignore[union-attr]
            case RunTraining(order):
                self.trained.append(order)
                update = SavedUpdate(
                    key=order.key,
                    model=order.model,
                    manifest=Manifest(Digest("e5" * 32), 8, 8, (bytes(32),)),
                    summary=SUMMARY,
                    masked=self.allows.timetable.masked,
                )
                self.take(Trained(update))
            case UploadUpdate(update):
                self.take(Uploaded(update.key))
            case RunEvaluation(order):
                self.take(Evaluated(order.key, EVALUATION))
            case ReportEvaluation(order, _):
                self.scored.append(order)
                self.take(EvaluationDelivered(order.key))
            case Decline():
                self.declined.append(effect)
            case RecordRefusal(rule=rule):
                self.refused.append(rule)
            case DeclareTrained():
                pass


@settings(max_examples=150, deadline=None)
@given(
    timetables(),
    st.booleans(),
    st.sampled_from(WHO),
    st.lists(st.one_of(orders(), st.just(RESTART), st.just(GATHERING)), max_size=30),
)
def test_nothing_is_answered_that_the_plan_does_not_have(
    times: Timetable, tells: bool, who: WhoTrains, story: list[Any]
) -> None:
    silo = Silo(AsPlanned(timetable=times, tells_scores=tells, silo="ward-1", who=who))
    for event in story:
        if event == RESTART:
            silo.restart()
        else:
            silo.take(event)
    for train in silo.trained:
        closing = times.masked and train.key.round == times.rounds + 1 and times.scores(times.rounds)
        assert 1 <= train.key.round <= times.rounds or closing
        assert train.key.round % 2 == {EVERYBODY: train.key.round % 2, WITHOUT: 0, WITH: 1}[who]
    for score in silo.scored:
        assert tells
        assert not times.masked, "one silo's own scores do not leave under masks"
        assert times.scores(score.key.round)
    for of_one in (silo.scored, silo.trained if times.masked else []):
        models: dict[int, set[Digest]] = {}
        for order in of_one:
            models.setdefault(order.key.round, set()).add(order.model)
        assert all(len(several) == 1 for several in models.values()), "a second model stood in for the first"
    # Under masks a model is scored with the round that it begins.
    scored = {(it.key.round - 1, it.model) for it in silo.trained if silo.allows.scores(it)}
    assert len(scored) <= len([number for number in range(times.rounds + 1) if times.scores(number)])
    assert scored == set() or (times.masked and tells)


@settings(max_examples=100, deadline=None)
@given(timetables())
def test_an_honest_coordinator_gets_all_that_the_plan_has(times: Timetable) -> None:
    """In its own order, each order twice, with a restart between any two."""
    silo = Silo(AsPlanned(timetable=times, tells_scores=True))
    expected = [number for number in range(times.rounds + 1) if times.scores(number)]
    for number in range(times.last_round + 1):
        model = digest_of(f"honest {number}".encode())
        before = digest_of(f"honest {number - 1}".encode())
        key = RoundKey(federation="care", plan=PLAN, round=number, attempt=1)
        sent: list[Event] = []
        if number:
            sent.append(Train(key=key, model=before, seconds_left=60.0))
        if number <= times.rounds and times.scores(number) and not times.masked:
            sent.append(Evaluate(key=key, model=model, seconds_left=60.0))
        for order in sent:
            silo.take(order)
            silo.take(order)
            silo.restart()
    assert silo.declined == []
    assert silo.refused == []
    assert sorted({it.key.round for it in silo.trained}) == list(range(1, times.last_round + 1))
    if times.masked:
        assert sorted({it.key.round - 1 for it in silo.trained if silo.allows.scores(it)}) == expected
        assert silo.scored == []
    else:
        assert sorted({it.key.round for it in silo.scored}) == expected


def at(number: int, kind: type[Train | Evaluate], model: Digest = MODELS[0], attempt: int = 1) -> Any:
    key = RoundKey(federation="care", plan=PLAN, round=number, attempt=attempt)
    return kind(key=key, model=model, seconds_left=60.0)


def silo_under(*, tells_scores: bool = True, silo: str = "", who: WhoTrains = EVERYBODY, **changes: Any) -> Silo:
    times = Timetable(**{"rounds": 3, "every": 1, "initial": True, "last": True, "masked": False, **changes})
    return Silo(AsPlanned(timetable=times, tells_scores=tells_scores, silo=silo, who=who))


def test_round_1000_of_a_plan_of_3_is_declined_by_name() -> None:
    for masked, last in ((False, 3), (True, 4)):
        silo = silo_under(masked=masked)
        silo.take(at(1000, Train))
        (declined,) = silo.declined
        assert declined.reason is DeclineReason.POLICY
        assert declined.detail == f"round 1000 was ordered, the plan's rounds are 1 to {last}"
        assert silo.refused == ["as_planned"]


def test_a_round_of_the_other_kind_is_declined_by_name() -> None:
    for who, number, kind in ((WITHOUT, 1, "with"), (WITH, 2, "without")):
        silo = silo_under(silo="ward-1", who=who)
        silo.take(at(number, Train))
        (declined,) = silo.declined
        assert declined.reason is DeclineReason.POLICY
        assert declined.detail == f"round {number} was ordered, in which silos {kind} labels train alone by the plan"
        assert silo.refused == ["as_planned"]
        silo.take(at(3 - number, Train))
        assert [it.key.round for it in silo.trained] == [3 - number]


def test_a_second_model_for_one_time_is_declined_after_a_restart_too() -> None:
    silo = silo_under()
    silo.take(at(1, Evaluate, MODELS[0]))
    silo.restart()
    silo.take(at(1, Evaluate, MODELS[1], attempt=2))
    assert [order.model for order in silo.scored] == [MODELS[0]]
    assert [it.reason for it in silo.declined] == [DeclineReason.INTEGRITY]
    assert silo.refused == ["one_model"]
    silo.take(at(1, Evaluate, MODELS[0], attempt=3))
    assert [order.model for order in silo.scored] == [MODELS[0]] * 2, "the same again is the same answer"


def test_under_masks_a_further_attempt_begins_with_the_same_model_or_not_at_all() -> None:
    silo = silo_under(masked=True)
    silo.take(at(1, Train, MODELS[0]))
    silo.take(GATHERING)
    silo.restart()
    silo.take(at(1, Train, MODELS[1], attempt=2))
    assert [order.model for order in silo.trained] == [MODELS[0]]
    assert silo.refused == ["one_model"]


def test_who_withholds_its_scores_trains_all_the_same_and_is_not_worn_out_by_being_asked() -> None:
    silo = silo_under(tells_scores=False, rounds=9)
    for number in range(FAILURES_IN_A_ROW + 2):
        silo.take(at(number, Evaluate, MODELS[0]))
    assert silo.scored == []
    assert {it.reason for it in silo.declined} == {DeclineReason.POLICY}
    assert silo.refused == [], "its people's choice is no attack"
    assert silo.agent.unready == ""
    silo.take(at(1, Train))
    assert len(silo.trained) == 1


def test_scores_that_the_silos_rules_keep_here_are_no_failure() -> None:
    silo = silo_under()
    for number in range(FAILURES_IN_A_ROW + 1):
        silo.agent, _ = step(silo.agent, at(number, Evaluate, MODELS[0]))
        silo.agent, _ = step(silo.agent, ModelFetched(MODELS[0]))
        silo.agent, effects = step(silo.agent, WorkFailed(reason=DeclineReason.POLICY, detail="few", told="few"))
        assert any(isinstance(effect, Decline) for effect in effects)
    assert silo.agent.unready == ""
    silo.agent, _ = step(replace(silo.agent, phase=Ready(PLAN)), at(1, Train))
    for _ in range(FAILURES_IN_A_ROW):  # of training they are
        silo.agent, _ = step(replace(silo.agent, phase=Ready(PLAN)), at(1, Train))
        silo.agent, _ = step(silo.agent, WorkFailed(reason=DeclineReason.POLICY, detail="no", told="no"))
    assert silo.agent.unready


@pytest.mark.parametrize(
    ("every", "initial", "last", "scored"),
    [
        (0, False, False, []),
        (1, True, True, [0, 1, 2, 3, 4, 5]),
        (2, False, True, [2, 4, 5]),
        (2, True, False, [0, 2, 4]),
        (9, False, False, []),
        (5, False, False, [5]),
    ],
)
def test_the_timetable(every: int, initial: bool, last: bool, scored: list[int]) -> None:
    times = Timetable(rounds=5, every=every, initial=initial, last=last, masked=True)
    assert [number for number in range(-1, 9) if times.scores(number)] == scored
    assert times.last_round == (6 if 5 in scored else 5)
    assert replace(times, masked=False).last_round == 5
    assert times.has_scores == bool(scored)
