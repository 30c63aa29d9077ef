"""Values for the round machine: a plan's terms, silos, updates, and one state of every phase."""

from typing import Any

from lorica_coordinator.rounds.events import (
    Aggregated,
    AggregationFailed,
    BudgetExhausted,
    DeadlinePassed,
    EvaluationReported,
    Event,
    GroupsChanged,
    MaskAnswered,
    MaskingOpened,
    PlanOffered,
    PlanPaused,
    PlanResumed,
    PlanStarted,
    PlanStopped,
    ReadinessDeclared,
    Resumed,
    SiloDeclined,
    SiloEnrolled,
    SiloLeft,
    SiloRevoked,
    SiloTrained,
    UpdateCommitted,
)
from lorica_coordinator.rounds.machine import step
from lorica_coordinator.rounds.states import (
    Aggregating,
    Collecting,
    Course,
    Evaluating,
    Finished,
    Gathering,
    Idle,
    Masking,
    Opening,
    State,
    Stopped,
    Task,
)
from lorica_coordinator.rounds.terms import PlanTerms
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome, SiloWeight
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator.events import OpenAttempt
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.messages import Advertisement
from lorica_security.secure_aggregation.parameters import Terms
from silo_wire.canonical import Digest, digest_of
from silo_wire.messages import DeclineReason, Evaluation, RoundKey, TrainingSummary
from tests.support.secagg_federation import entropy, identity_key, public_key, ranges

FEDERATION = FederationName("health-net")
A, B, C = SiloName("bank-a"), SiloName("bank-b"), SiloName("clinic-c")
PLAN = digest_of(b"plan")
INITIAL = digest_of(b"initial model")
SIGNATURE = b"s" * 64
T0 = 1_700_000_000.0


def terms(**changes: Any) -> PlanTerms:
    fields: dict[str, Any] = {
        "federation": FEDERATION,
        "plan": PLAN,
        "name": "first",
        "rounds": 2,
        "min_silos": 2,
        "start_when_ready": False,
        "gathering_deadline_s": 60.0,
        "training_deadline_s": 600.0,
        "evaluation_deadline_s": 120.0,
        "evaluate_every": 1,
        "evaluate_initial": False,
        "evaluate_last": True,
    }
    return PlanTerms(**{**fields, **changes})


def key(round_number: int = 1, attempt: int = 1) -> RoundKey:
    return RoundKey(federation=FEDERATION, plan=PLAN, round=round_number, attempt=attempt)


def summary(*, examples: int = 10, loss_max: float = 3.0, loss_min: float = 1.0) -> TrainingSummary:
    return TrainingSummary(
        examples=examples,
        loss_max=loss_max,
        loss_min=loss_min,
        loss_first=loss_max,
        loss_last=loss_min,
        optimizer_steps=5,
        seconds=1.5,
    )


def update(silo: SiloName, *, content: str = "update", examples: int = 10) -> CommittedUpdate:
    return CommittedUpdate(
        silo=silo,
        digest=digest_of(f"{content} of {silo}".encode()),
        summary=summary(examples=examples),
        delta_norm=0.5,
    )


def evaluation(exact_matches: int = 4, examples: int = 10) -> Evaluation:
    return Evaluation(
        split="dev",
        examples=examples,
        exact_matches=exact_matches,
        executed=5,
        execution_matches=3,
        loss_per_token=1.25,
        seconds=2.0,
    )


def model_after(round_number: int) -> Digest:
    return digest_of(f"model of round {round_number}".encode())


def revoked(silo: SiloName, now: float = T0) -> SiloRevoked:
    return SiloRevoked(now=now, silo=silo)


def started(now: float = T0, **changes: Any) -> PlanStarted:
    return PlanStarted(now=now, terms=terms(**changes), model=INITIAL, signature=SIGNATURE)


def enrolled(silo: SiloName, now: float = T0) -> SiloEnrolled:
    return SiloEnrolled(now=now, silo=silo)


def regrouped(*groups: tuple[SiloName, ...], now: float = T0) -> GroupsChanged:
    return GroupsChanged(now=now, groups=Partition.of(groups))


def ready(silo: SiloName, now: float = T0) -> ReadinessDeclared:
    return ReadinessDeclared(now=now, silo=silo, ready=True)


def committed(
    silo: SiloName, at: RoundKey | None = None, *, now: float = T0, content: str = "update", examples: int = 10
) -> UpdateCommitted:
    return UpdateCommitted(
        now=now, key=at or key(), update=update(silo, content=content, examples=examples), signature=SIGNATURE
    )


def declined(silo: SiloName, at: RoundKey | None = None, *, now: float = T0) -> SiloDeclined:
    return SiloDeclined(
        now=now, key=at or key(), silo=silo, reason=DeclineReason.TRAINING_FAILED, detail="loss is not finite"
    )


def trained(silo: SiloName, at: RoundKey | None = None, *, model: Digest = INITIAL, now: float = T0) -> SiloTrained:
    return SiloTrained(now=now, key=at or key(), silo=silo, model=model)


def attempt(at: RoundKey | None = None) -> Attempt:
    at = at or key()
    return Attempt(
        federation=FEDERATION,
        plan=bytes.fromhex(PLAN),
        round=at.round,
        number=at.attempt,
        id=entropy("attempt", at.round, at.attempt),
    )


LINK = first_link(FEDERATION, Partition.singletons((A, B, C, SiloName("clinic-d"))))
"""Every silo is a group of its own."""


def masking_opened(
    at: RoundKey | None = None,
    *,
    silos: tuple[SiloName, ...] = (A, B, C),
    model: Digest = INITIAL,
    now: float = T0,
    **of_terms: Any,
) -> MaskingOpened:
    of_round = Terms(model=bytes.fromhex(model), ranges=ranges(), link=LINK, **of_terms)
    return MaskingOpened(
        now=now,
        key=at or key(),
        opening=OpenAttempt(attempt=attempt(at), terms=of_round, invited=silos),
        identities=tuple((silo, identity_key(silo).public_key()) for silo in silos),
    )


def mask_answered(silo: SiloName, at: RoundKey | None = None, *, now: float = T0) -> MaskAnswered:
    """With keys that nobody signed."""
    answer = Advertisement(attempt=attempt(at), silo=silo, mask_key=public_key("mask"), box_key=public_key("box"))
    return MaskAnswered(now=now, key=at or key(), answer=answer)


def aggregated(
    at: RoundKey | None = None,
    *,
    model: Digest | None = None,
    silos: tuple[SiloName, ...] = (A, B),
    outcome: Outcome = Outcome.APPLIED,
    now: float = T0,
) -> Aggregated:
    at = at or key()
    weights = tuple(SiloWeight(silo=silo, weight=20.0, share=1 / len(silos)) for silo in silos)
    result = AggregationResult(model=model or model_after(at.round), outcome=outcome, weights=weights)
    return Aggregated(now=now, key=at, result=result, signature=SIGNATURE)


def reported(
    silo: SiloName, at: RoundKey | None = None, *, model: Digest | None = None, exact_matches: int = 4, now: float = T0
) -> EvaluationReported:
    at = at or key()
    return EvaluationReported(
        now=now,
        key=at,
        silo=silo,
        model=model or (model_after(at.round) if at.round else INITIAL),
        evaluation=evaluation(exact_matches),
    )


def after(state: State, *events: Event) -> State:
    for event in events:
        state, _ = step(state, event)
    return state


def course(**changes: Any) -> Course:
    return Course(
        **{
            "terms": terms(),
            "population": frozenset({A, B, C}),
            "ready": frozenset({A, B}),
            "model": INITIAL,
            **changes,
        }
    )


TRAIN_1 = Opening(round=1, attempt=1, task=Task.TRAINING)

IDLE = Idle(population=frozenset({A, B}))
GATHERING = Gathering(course=course(), opening=TRAIN_1, started=True, deadline=T0 + 60)
COLLECTING = Collecting(course=course(), round=1, attempt=1, cohort=(A, B), deadline=T0 + 600)
MASKING = Masking(
    course=course(terms=terms(secure_aggregation=True, masking_deadline_s=30.0)),
    round=1,
    attempt=1,
    silos=(A, B),
    deadline=T0 + 600,
)
AGGREGATING = Aggregating(course=course(), round=1, attempt=1, updates=(update(A), update(B)))
EVALUATING = Evaluating(
    course=course(model=model_after(1), model_round=1), round=1, attempt=1, cohort=(A, B), deadline=T0 + 120
)
STOPPED = Stopped(course=course(), opening=TRAIN_1)
FINISHED = Finished(course=course(model=model_after(2), model_round=2))

ONE_OF_EACH_STATE: dict[str, State] = {
    state.phase: state for state in (IDLE, GATHERING, COLLECTING, MASKING, AGGREGATING, EVALUATING, STOPPED, FINISHED)
}

ONE_OF_EACH_EVENT: dict[str, Event] = {
    type(event).__name__: event
    for event in (
        PlanOffered(now=T0, terms=terms(), model=INITIAL, signature=SIGNATURE),
        started(),
        PlanStopped(now=T0),
        PlanPaused(now=T0),
        PlanResumed(now=T0),
        enrolled(C),
        ready(A),
        SiloLeft(now=T0, silo=A),
        revoked(A),
        regrouped((A, B, C)),
        committed(A),
        trained(A),
        masking_opened(),
        mask_answered(A),
        declined(A),
        aggregated(),
        AggregationFailed(now=T0, key=key(), silo=A, reason="spool is damaged"),
        BudgetExhausted(now=T0, key=key(), reason="epsilon 8.1 of 8"),
        reported(A),
        DeadlinePassed(now=T0 + 600, deadline=T0 + 600),
        Resumed(now=T0 + 5, population=frozenset({A, B, C})),
    )
}
