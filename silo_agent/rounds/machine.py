"""The agent's one transition table: (phase, event) -> handler, `step(agent, event) -> (agent, effects)`.

Orders are levels: whatever arrives is what the coordinator wants now, so an order repeated after a reconnection changes
nothing, another order replaces the work under way, and an agent that was restarted needs no history but its journal.

    Idle, Ready, Refused, Done, Declined, Complete   rest: nothing is under way
    Preparing, Collecting                            work on a plan, and on the model that a finished plan leaves
    Fetching, Training, Uploading                    work on a Train order
    Fetching, Training, Holding, Answering           the same under secure aggregation: the delta stays, Mask orders follow
    Fetching, Evaluating, Reporting                  work on an Evaluate order
    Stopped                                          the end: whatever comes is ignored

Rules that the handlers keep:
- Work on a round begins only under a plan that was prepared in this process, hence allowed by policy.
- What the plan does not have is declined: rounds beyond its own, scores at other times or, under masks, in the clear.
- One attempt, one model: a second model for the same attempt is declined, whichever of the two is right. Scores of a round, and
  under masks its attempts, are of one model for good.
- An update on disk is uploaded again, never trained again: the same bytes or none. A private one serves every attempt at its
  round that begins with its model: to train again would be another release of the records, and cost again.
- What is being delivered is seen through: its receipt may be overtaken by the next order, and only the call itself says
  whether it counted. The newest order waits as `then`.
- What secure aggregation left is erased as soon as nothing of it can be asked for again: when the shares are delivered,
  when this silo declines, when an order says that the attempt is over.
- Paused, no new round is taken; the round that this silo already works on goes on.
- Readiness follows every decline, or the coordinator waits for it; after FAILURES_IN_A_ROW it is withheld, so that a
  silo that cannot do the work does not spin the rounds of all.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lorica_security.errors import StateError
from silo_agent.rounds.as_planned import AsPlanned, ModelOf, second_model
from silo_agent.rounds.effects import (
    Activity,
    AnswerMask,
    CancelWork,
    DeclareReadiness,
    DeclareTrained,
    Decline,
    Effect,
    EndMasking,
    FetchModel,
    FetchPlan,
    JournalActivity,
    JournalModel,
    JournalOutcome,
    JournalPlan,
    JournalRoundModel,
    JournalUpdate,
    Outcome,
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
    MaskAnswered,
    ModelFetched,
    PauseAsked,
    PlanPrepared,
    PlanRefused,
    ResumeAsked,
    SavedUpdate,
    StopAsked,
    Trained,
    Uploaded,
    WorkFailed,
    WorkUnwanted,
)
from silo_wire.canonical import Digest
from silo_wire.messages import (
    DeclineReason,
    Evaluate,
    Evaluation,
    Finished,
    Mask,
    Prepare,
    RoundKey,
    Standby,
    StandbyReason,
    Train,
)

PAUSED = "the silo is paused: its people resume it with `silo-agent resume`"
STOPPING = "the silo agent is being stopped"
FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class Idle:
    pass


@dataclass(frozen=True, slots=True)
class Preparing:
    """A plan is being fetched and checked; `then` is the order that waits for it, `held` the update that was held before."""

    plan: Digest
    then: Train | Mask | Evaluate | Finished | None = None
    held: SavedUpdate | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    plan: Digest


@dataclass(frozen=True, slots=True)
class Holding:
    """The delta is here to be masked; others still train, or answer."""

    update: SavedUpdate


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """`detail` stays in this silo, `told` goes to the coordinator; so in Declined."""

    plan: Digest
    reason: DeclineReason
    detail: str
    told: str


@dataclass(frozen=True, slots=True)
class Fetching:
    order: Train | Evaluate


@dataclass(frozen=True, slots=True)
class Training:
    order: Train


@dataclass(frozen=True, slots=True)
class Uploading:
    order: Train
    update: SavedUpdate
    then: Prepare | Train | Mask | Evaluate | Finished | None = None


@dataclass(frozen=True, slots=True)
class Answering:
    """A step of secure aggregation is being taken."""

    order: Mask
    update: SavedUpdate
    then: Prepare | Standby | Train | Mask | Evaluate | Finished | None = None


@dataclass(frozen=True, slots=True)
class Evaluating:
    order: Evaluate


@dataclass(frozen=True, slots=True)
class Reporting:
    order: Evaluate
    evaluation: Evaluation
    then: Prepare | Train | Mask | Evaluate | Finished | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """This silo's part of the phase is delivered; `evaluation` is kept in case it is asked for again."""

    order: Train | Mask | Evaluate
    evaluation: Evaluation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    order: Train | Mask | Evaluate
    reason: DeclineReason
    told: str


@dataclass(frozen=True, slots=True)
class Collecting:
    """The plan is finished and its best model is on the way, for `silo-agent ask`."""

    order: Finished


@dataclass(frozen=True, slots=True)
class Complete:
    order: Finished


@dataclass(frozen=True, slots=True)
class Stopped:
    pass


Phase = (
    Idle
    | Preparing
    | Ready
    | Refused
    | Fetching
    | Training
    | Uploading
    | Holding
    | Answering
    | Evaluating
    | Reporting
    | Done
    | Declined
    | Collecting
    | Complete
    | Stopped
)
ON_AN_ORDER = (Fetching, Training, Uploading, Answering, Evaluating, Reporting)
DELIVERING = (Uploading, Answering, Reporting)
WORKING = (Preparing, Collecting, *ON_AN_ORDER)
COUNTED_ON = (Ready, Done, Declined, Holding)  # the coordinator may open the next round with this silo


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Where the agent stands.

    `prepared` was checked in this process, and `allows` is what may be ordered under it; `saved` is on disk, perhaps from an earlier
    one, and so are the `models` that orders were about; `failures` came since the last work that succeeded, `trouble` is what the
    coordinator was told of the latest.
    """

    phase: Phase = Idle()
    paused: bool = False
    prepared: Digest | None = None
    allows: AsPlanned | None = None
    models: Mapping[ModelOf, Digest] = field(default_factory=dict)
    saved: SavedUpdate | None = None
    failures: int = 0
    trouble: str = ""

    @property
    def unready(self) -> str:
        """Why this silo takes no new round; empty when it does."""
        if self.paused:
            return PAUSED
        if self.failures >= FAILURES_IN_A_ROW:
            return (
                f"{self.failures} pieces of work failed here in a row, the last: {self.trouble}; mend it, then restart"
            )
        return ""


Step = tuple[Agent, tuple[Effect, ...]]


def step(agent: Agent, event: Event) -> Step:
    """The next agent and what to do, journal effects first.

    Raises StateError, and changes nothing, for a result of work that is not under way.
    """
    handler = TABLE.get((type(agent.phase), type(event)))
    if handler is None:
        raise StateError(f"{type(event).__name__} does not fit {type(agent.phase).__name__}: nothing was changed")
    after, effects = handler(agent, agent.phase, event)
    before_shown, after_shown = shown(agent.phase), shown(after.phase)
    if after_shown != before_shown:
        effects = (after_shown, *effects)
    journal = tuple(effect for effect in effects if isinstance(effect, _JOURNAL))
    return after, journal + tuple(effect for effect in effects if not isinstance(effect, _JOURNAL))


_JOURNAL = (JournalPlan, JournalModel, JournalRoundModel, JournalUpdate, JournalOutcome, JournalActivity, RecordRefusal)


def shown(phase: Phase) -> JournalActivity:
    """What a person is told of a phase."""
    match phase:
        case Preparing():
            return JournalActivity(Activity.PREPARING)
        case Fetching(order):
            return JournalActivity(Activity.FETCHING, order.key)
        case Collecting():
            return JournalActivity(Activity.FETCHING)
        case Training(order):
            return JournalActivity(Activity.TRAINING, order.key)
        case Uploading(order):
            return JournalActivity(Activity.UPLOADING, order.key)
        case Answering(order):
            return JournalActivity(Activity.MASKING, order.key)
        case Evaluating(order) | Reporting(order):
            return JournalActivity(Activity.EVALUATING, order.key)
        case Refused(detail=detail):
            return JournalActivity(Activity.REFUSING, detail=detail)
        case Complete():
            return JournalActivity(Activity.FINISHED)
        case Stopped():
            return JournalActivity(Activity.STOPPED)
        case _:
            return JournalActivity(Activity.WAITING)


# ---- leaving what is under way ------------------------------------------------------------------------------------


def _leave(phase: Phase) -> tuple[Effect, ...]:
    """What it takes to drop the work of `phase`, if it has any."""
    match phase:
        case Fetching(order) | Training(order) | Uploading(order) | Evaluating(order) | Reporting(order):
            return _outcome(order, Outcome.CLOSED, _WENT_ON), CancelWork()
        case Answering(order):
            return _outcome(order, Outcome.CLOSED, _WENT_ON), CancelWork(), EndMasking(order.key)
        case Holding(update):
            closed = JournalOutcome(key=update.key, evaluation=False, outcome=Outcome.CLOSED, detail=_WENT_ON)
            return closed, EndMasking(update.key)
        case Preparing(held=SavedUpdate() as update):
            return CancelWork(), EndMasking(update.key)
        case Preparing() | Collecting():
            return (CancelWork(),)
        case _:
            return ()


_WENT_ON = "the coordinator went on"


def _outcome(order: Train | Mask | Evaluate, outcome: Outcome, detail: str = "") -> JournalOutcome:
    return JournalOutcome(key=order.key, evaluation=isinstance(order, Evaluate), outcome=outcome, detail=detail)


def _rest(agent: Agent) -> Agent:
    return replace(agent, phase=Idle() if agent.prepared is None else Ready(agent.prepared))


def _readiness(agent: Agent) -> tuple[Effect, ...]:
    if agent.prepared is None:
        return ()
    return (DeclareReadiness(plan=agent.prepared, ready=not agent.unready, reason=agent.unready),)


def _unreadiness(agent: Agent) -> tuple[Effect, ...]:
    """Said at the end of work that was under way when the reason arose."""
    return _readiness(agent) if agent.unready else ()


# ---- orders -------------------------------------------------------------------------------------------------------


def _prepare(agent: Agent, phase: Phase, order: Prepare) -> Step:
    match phase:
        case Preparing(plan) if plan == order.plan:
            return replace(agent, phase=replace(phase, then=None)), ()
        case Holding(update) if update.key.plan == order.plan:  # a step of this very attempt may follow
            if agent.prepared == order.plan:
                return agent, _readiness(agent)
            return replace(agent, phase=Preparing(order.plan, held=update)), (FetchPlan(order.plan),)
        case Answering() if agent.prepared == order.plan:
            return replace(agent, phase=replace(phase, then=None)), _readiness(agent)
        case Answering():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Refused(plan=plan, told=told) if plan == order.plan:
            return agent, (DeclareReadiness(plan=plan, ready=False, reason=told),)
        case Uploading() | Reporting() if agent.prepared == order.plan:
            return replace(agent, phase=replace(phase, then=None)), _readiness(agent)
        case Uploading() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Done() if agent.prepared == order.plan:
            return agent, _readiness(agent)
        case _ if agent.prepared == order.plan:
            return _rest(agent), (*_leave(phase), *_readiness(agent))
        case _:
            return replace(agent, phase=Preparing(order.plan)), (*_leave(phase), FetchPlan(order.plan))


def _standby_at_rest(agent: Agent, phase: Phase, order: Standby) -> Step:
    match order.reason:
        case StandbyReason.NO_PLAN | StandbyReason.STOPPED:
            return replace(agent, phase=phase if isinstance(phase, Complete | Idle) else Idle()), ()
        case StandbyReason.GATHERING if not isinstance(phase, Refused):
            # The coordinator counts on this silo: it must hear again that a paused one does not come.
            return _rest(agent), _unreadiness(agent)
        case _:
            return agent, ()


def _standby_preparing(agent: Agent, phase: Preparing, order: Standby) -> Step:
    if order.reason in (StandbyReason.NO_PLAN, StandbyReason.STOPPED):
        return replace(agent, phase=Idle()), _leave(phase)
    if phase.held is not None and order.reason not in _STILL_MASKING:
        return replace(agent, phase=Preparing(phase.plan)), (EndMasking(phase.held.key),)
    return replace(agent, phase=replace(phase, then=None)), ()


_STILL_MASKING = (StandbyReason.TRAINED, StandbyReason.UPDATE_RECEIVED, StandbyReason.AGGREGATING)


def _standby_holding(agent: Agent, phase: Holding, order: Standby) -> Step:
    if order.reason in _STILL_MASKING:
        return agent, ()
    after, effects = _standby_at_rest(_rest(agent), Ready(phase.update.key.plan), order)
    return after, (*_leave(phase), *effects)


def _standby_answering(agent: Agent, phase: Answering, order: Standby) -> Step:
    return replace(agent, phase=replace(phase, then=None if order.reason in _STILL_MASKING else order)), ()


def _standby_collecting(agent: Agent, _phase: Collecting, _order: Standby) -> Step:
    return agent, ()


def _standby_delivering(agent: Agent, phase: Uploading | Reporting, _order: Standby) -> Step:
    return replace(agent, phase=replace(phase, then=None)), ()


def _standby_working(agent: Agent, phase: Fetching | Training | Evaluating, order: Standby) -> Step:
    over = order.reason in (StandbyReason.NO_PLAN, StandbyReason.STOPPED)
    after = replace(agent, phase=Idle()) if over else _rest(agent)
    return after, (*_leave(phase), *(() if over else _unreadiness(after)))


def _round_order(agent: Agent, phase: Phase, order: Train | Evaluate) -> Step:
    """A Train or Evaluate order, in any phase but Stopped."""
    match phase:
        case Fetching(known) | Training(known) | Uploading(known) | Evaluating(known) | Reporting(known) if _same(
            known, order
        ):
            if known.model != order.model:
                return _two_models(agent, phase, order)
            return (replace(agent, phase=replace(phase, then=None)) if isinstance(phase, DELIVERING) else agent), ()
        case Holding(update) if isinstance(order, Train) and order.key == update.key:
            if update.model != order.model:
                return _two_models(agent, phase, order)
            return agent, (DeclareTrained(key=update.key, model=update.model),)
        case Answering(known) if isinstance(order, Train) and order.key == known.key:
            return replace(agent, phase=replace(phase, then=None)), ()
        case Uploading() | Answering() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Preparing(plan, Train() | Evaluate() as known) if _same(known, order):
            if known.model == order.model:
                return agent, ()
            erase = () if phase.held is None else (EndMasking(phase.held.key),)
            return replace(agent, phase=Preparing(plan)), (*_decline_two_models(order), *erase)
        case Declined(order=known, reason=reason, told=told) if known.key == order.key and type(known) is type(order):
            if reason is not DeclineReason.PAUSED or agent.paused:
                return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case Done(Evaluate() as known, evaluation) if _same(known, order) and evaluation is not None:
            if known.model == order.model and isinstance(order, Evaluate):
                return replace(agent, phase=Reporting(order, evaluation)), (ReportEvaluation(order, evaluation),)
            return _two_models(agent, phase, order)
        case Refused(plan=plan, reason=reason, told=told) if plan == order.key.plan:
            return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case _:
            pass
    if agent.paused and not _of_same_round(phase, order.key):
        if isinstance(phase, Preparing) and phase.plan == order.key.plan:  # goes on, to be ready on resuming
            return replace(agent, phase=Preparing(phase.plan)), _decline(order, DeclineReason.PAUSED, PAUSED)
        return _declined(agent, phase, order, DeclineReason.PAUSED, PAUSED)
    if agent.prepared != order.key.plan:
        if isinstance(phase, Preparing) and phase.plan == order.key.plan:
            return replace(agent, phase=replace(phase, then=order)), ()
        return replace(agent, phase=Preparing(order.key.plan, order)), (*_leave(phase), FetchPlan(order.key.plan))
    return _begin(agent, phase, order)


def _mask_order(agent: Agent, phase: Phase, order: Mask) -> Step:
    """In any phase but Stopped."""
    match phase:
        case Answering(known) if known == replace(order, seconds_left=known.seconds_left):
            return replace(agent, phase=replace(phase, then=None)), ()
        case Uploading() | Answering() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case Declined(order=known, reason=reason, told=told) if known.key == order.key and isinstance(known, Mask):
            return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case Refused(plan=plan, reason=reason, told=told) if plan == order.key.plan:
            return agent, (Decline(key=order.key, reason=reason, detail=told),)
        case Preparing(plan) if plan == order.key.plan:
            return replace(agent, phase=replace(phase, then=order)), ()
        case _ if agent.prepared == order.key.plan:
            return _begin(agent, phase, order)
        case Holding(update) if update.key == order.key:
            return replace(agent, phase=Preparing(order.key.plan, order, update)), (FetchPlan(order.key.plan),)
        case _:
            return replace(agent, phase=Preparing(order.key.plan, order)), (*_leave(phase), FetchPlan(order.key.plan))


def _begin(agent: Agent, phase: Phase, order: Train | Mask | Evaluate) -> Step:
    """Under a prepared plan; `phase` is what is left for it."""
    if isinstance(order, Mask):
        return _begin_masking(agent, phase, order)
    assert agent.allows is not None, "a plan is prepared with what it allows"
    if unplanned := agent.allows.unplanned(order):
        after, effects = _declined(agent, phase, order, DeclineReason.POLICY, unplanned)
        return after, (RecordRefusal(rule="as_planned", detail=unplanned), *effects)
    if isinstance(order, Evaluate) and not agent.allows.tells_scores:
        return _declined(agent, phase, order, DeclineReason.POLICY, NO_SCORES_LEAVE)
    of = agent.allows.model_of(order)
    if second_model(agent.models, of, order.model):
        detail = f"{_SECOND_MODEL}: {order.model} for round {order.key.round}"
        after, effects = _declined(agent, phase, order, DeclineReason.INTEGRITY, _SECOND_MODEL)
        return after, (RecordRefusal(rule="one_model", detail=detail), *effects)
    if of is None or of in agent.models:
        return _begin_work(agent, phase, order)
    plan, number = of
    after, effects = _begin_work(replace(agent, models={**agent.models, of: order.model}), phase, order)
    return after, (JournalRoundModel(plan=plan, round=number, model=order.model), *effects)


def _begin_work(agent: Agent, phase: Phase, order: Train | Evaluate) -> Step:
    saved = agent.saved
    if isinstance(order, Train) and saved is not None and _serves(saved, order):
        again = replace(saved, key=order.key)
        after, effects = _begin_work(replace(agent, saved=again), phase, order)
        return after, (JournalUpdate(again, made_for=saved.key), *effects)
    if isinstance(order, Train) and saved is not None and saved.key == order.key:
        if saved.model != order.model:
            return _two_models(agent, phase, order)
        if saved.masked:
            declared = DeclareTrained(key=saved.key, model=saved.model)
            return replace(agent, phase=Holding(saved)), (*_leave(phase), declared)
        return replace(agent, phase=Uploading(order, saved)), (*_leave(phase), UploadUpdate(saved))
    return replace(agent, phase=Fetching(order)), (*_leave(phase), FetchModel(order))


def _serves(saved: SavedUpdate, order: Train) -> bool:
    """Whether `saved`, of an earlier attempt, is released already and what this one would train anew."""
    of_round = (saved.key.federation, saved.key.plan, saved.key.round) == (
        order.key.federation,
        order.key.plan,
        order.key.round,
    )
    return saved.private and of_round and saved.key.attempt < order.key.attempt and saved.model == order.model


def _begin_masking(agent: Agent, phase: Phase, order: Mask) -> Step:
    saved = agent.saved
    if saved is None or saved.key != order.key or not saved.masked:
        return _declined(agent, phase, order, DeclineReason.TRAINING_FAILED, "the delta of this attempt is not here")
    if saved.model != order.model:
        return _two_models(agent, phase, order)
    left = () if isinstance(phase, Holding) and phase.update.key == order.key else _leave(phase)
    return replace(agent, phase=Answering(order, saved)), (*left, AnswerMask(order, saved))


_SECOND_MODEL = "another model stands in this one's place since an earlier order"
NO_SCORES_LEAVE = "no scores leave this silo: its people say so"
_TWO_MODELS = "two different models were handed out for one attempt"


def _two_models(agent: Agent, phase: Phase, order: Train | Mask | Evaluate) -> Step:
    after = replace(agent, phase=Declined(order=order, reason=DeclineReason.INTEGRITY, told=_TWO_MODELS))
    return after, (*_leave(phase), *_decline_two_models(order))


def _decline_two_models(order: Train | Mask | Evaluate) -> tuple[Effect, ...]:
    detail = f"{_TWO_MODELS}: round {order.key.round} attempt {order.key.attempt}, the second is {order.model}"
    refusal = RecordRefusal(rule="one_model", detail=detail)
    return (refusal, *_decline(order, DeclineReason.INTEGRITY, _TWO_MODELS))


def _declined(agent: Agent, phase: Phase, order: Train | Mask | Evaluate, reason: DeclineReason, told: str) -> Step:
    after = replace(agent, phase=Declined(order=order, reason=reason, told=told))
    return after, (*_leave(phase), *_decline(order, reason, told))


def _decline(order: Train | Mask | Evaluate, reason: DeclineReason, told: str, detail: str = "") -> tuple[Effect, ...]:
    return (
        _outcome(order, Outcome.DECLINED, f"{reason.value}: {detail or told}"),
        Decline(key=order.key, reason=reason, detail=told),
    )


def _same(known: Train | Evaluate, order: Train | Evaluate) -> bool:
    return type(known) is type(order) and known.key == order.key


def _of_same_round(phase: Phase, key: RoundKey) -> bool:
    match phase:
        case (
            Fetching(order)
            | Training(order)
            | Uploading(order)
            | Evaluating(order)
            | Reporting(order)
            | Answering(order)
            | Done(order)
            | Preparing(_, (Train() | Mask() | Evaluate()) as order)
        ):
            return (order.key.plan, order.key.round) == (key.plan, key.round)
        case Holding(update):
            return (update.key.plan, update.key.round) == (key.plan, key.round)
        case _:
            return False


def _finished(agent: Agent, phase: Phase, order: Finished) -> Step:
    match phase:
        case Collecting(known) | Complete(known) | Preparing(_, Finished() as known) if known == order:
            return agent, ()
        case Refused(plan=plan) if plan == order.plan:
            return agent, ()
        case Uploading() | Answering() | Reporting():
            return replace(agent, phase=replace(phase, then=order)), ()
        case _:
            pass
    if agent.prepared != order.plan:
        if isinstance(phase, Preparing) and phase.plan == order.plan:
            return replace(agent, phase=replace(phase, then=order)), ()
        return replace(agent, phase=Preparing(order.plan, order)), (*_leave(phase), FetchPlan(order.plan))
    return replace(agent, phase=Collecting(order)), (*_leave(phase), FetchModel(order))


# ---- results ------------------------------------------------------------------------------------------------------


def _plan_prepared(agent: Agent, phase: Preparing, event: PlanPrepared) -> Step:
    _require(event.plan == phase.plan, event)
    agent = replace(agent, prepared=event.plan, allows=event.allows)
    journal = JournalPlan(event.plan)
    left: Phase = Idle() if phase.held is None else Holding(phase.held)
    match phase.then:
        case Train(key=key) as order if phase.held is not None and phase.held.key == key:
            after, effects = _round_order(replace(agent, phase=left), left, order)
        case Train() | Mask() | Evaluate() as order:
            after, effects = _begin(agent, left, order)
        case Finished() as order:
            after, effects = replace(agent, phase=Collecting(order)), (*_leave(left), FetchModel(order))
        case None if phase.held is not None:
            after, effects = replace(agent, phase=left), _readiness(agent)
        case None:
            after, effects = _rest(agent), _readiness(agent)
    return after, (journal, *effects)


def _plan_refused(agent: Agent, phase: Preparing, event: PlanRefused) -> Step:
    _require(event.plan == phase.plan, event)
    refused = Refused(plan=event.plan, reason=event.reason, detail=event.detail, told=event.told)
    after = replace(agent, phase=refused)
    unready = DeclareReadiness(plan=event.plan, ready=False, reason=event.told)
    erase = () if phase.held is None else (EndMasking(phase.held.key),)
    match phase.then:
        case Train() | Mask() | Evaluate() as order:
            return after, (*_decline(order, event.reason, event.told, event.detail), *erase, unready)
        case Finished():
            return after, erase
        case None:
            return after, (*erase, unready)


def _model_for_a_round(agent: Agent, phase: Fetching, event: ModelFetched) -> Step:
    _require(event.model == phase.order.model, event)
    journal = JournalModel(phase.order.key.plan, event.model)
    match phase.order:
        case Train() as order:  # which writes over the update before
            return replace(agent, phase=Training(order), saved=None), (journal, RunTraining(order))
        case Evaluate() as order:
            return replace(agent, phase=Evaluating(order)), (journal, RunEvaluation(order))


def _model_of_a_finished_plan(agent: Agent, phase: Collecting, event: ModelFetched) -> Step:
    _require(event.model == phase.order.best_model, event)
    return replace(agent, phase=Complete(phase.order)), (JournalModel(phase.order.plan, event.model),)


def _trained(agent: Agent, phase: Training, event: Trained) -> Step:
    update = event.update
    _require((update.key, update.model) == (phase.order.key, phase.order.model), event)
    if update.masked:
        after = replace(agent, phase=Holding(update), saved=update)
        return after, (JournalUpdate(update), DeclareTrained(key=update.key, model=update.model))
    after = replace(agent, phase=Uploading(phase.order, update), saved=update)
    return after, (JournalUpdate(update), UploadUpdate(update))


def _mask_answered(agent: Agent, phase: Answering, event: MaskAnswered) -> Step:
    _require(event.key == phase.order.key, event)
    if not event.revealed:
        return _go_on(replace(agent, phase=Holding(phase.update)), phase, ())
    after = replace(agent, phase=Done(phase.order), failures=0, trouble="")
    done = (_outcome(phase.order, Outcome.UPLOADED), EndMasking(phase.order.key))
    return _go_on(after, phase, (*done, *_unreadiness(after)))


def _uploaded(agent: Agent, phase: Uploading, event: Uploaded) -> Step:
    _require(event.key == phase.order.key, event)
    after = replace(agent, phase=Done(phase.order), failures=0, trouble="")
    return _go_on(after, phase, (_outcome(phase.order, Outcome.UPLOADED), *_unreadiness(after)))


def _evaluated(agent: Agent, phase: Evaluating, event: Evaluated) -> Step:
    _require(event.key == phase.order.key, event)
    after = replace(agent, phase=Reporting(phase.order, event.evaluation))
    return after, (ReportEvaluation(phase.order, event.evaluation),)


def _evaluation_delivered(agent: Agent, phase: Reporting, event: EvaluationDelivered) -> Step:
    _require(event.key == phase.order.key, event)
    after = replace(agent, phase=Done(phase.order, phase.evaluation), failures=0, trouble="")
    return _go_on(after, phase, (_outcome(phase.order, Outcome.EVALUATED), *_unreadiness(after)))


def _failed(
    agent: Agent, phase: Fetching | Training | Uploading | Answering | Evaluating | Reporting, event: WorkFailed
) -> Step:
    # Scores that the silo's own rules keep here are no failure: it trains on.
    kept_here = isinstance(phase, Evaluating) and event.reason is DeclineReason.POLICY
    after = replace(
        agent,
        phase=Declined(order=phase.order, reason=event.reason, told=event.told),
        failures=agent.failures if kept_here else agent.failures + 1,
        trouble=event.told,
    )
    erase = (EndMasking(phase.order.key),) if isinstance(phase, Answering) else ()
    told = _decline(phase.order, event.reason, event.told, event.detail)
    return _go_on(after, phase, (*told, *erase, *_unreadiness(after)))


def _collecting_ended(agent: Agent, phase: Collecting, _event: WorkFailed | WorkUnwanted) -> Step:
    return replace(agent, phase=Complete(phase.order)), ()


def _unwanted(
    agent: Agent, phase: Fetching | Training | Uploading | Evaluating | Reporting, event: WorkUnwanted
) -> Step:
    after = _rest(agent)
    return _go_on(after, phase, (_outcome(phase.order, Outcome.CLOSED, event.detail), *_unreadiness(after)))


def _step_unwanted(agent: Agent, phase: Answering, event: WorkUnwanted) -> Step:
    """That step alone: what is asked next may fit."""
    return _go_on(replace(agent, phase=Holding(phase.update)), phase, ())


def _go_on(agent: Agent, left: Phase, effects: tuple[Effect, ...]) -> Step:
    """With the order that came while `left` was delivering, if one did."""
    if not isinstance(left, DELIVERING) or left.then is None:
        return agent, effects
    after, more = TABLE[type(agent.phase), type(left.then)](agent, agent.phase, left.then)
    return after, (*effects, *more)


def _require(holds: bool, event: Event) -> None:
    if not holds:
        raise StateError(f"{type(event).__name__} is of other work than is under way: nothing was changed")


# ---- wishes of this silo's people -----------------------------------------------------------------------------------


def _pause(agent: Agent, phase: Phase, _event: PauseAsked) -> Step:
    after = replace(agent, paused=True)
    return after, _readiness(after) if isinstance(phase, COUNTED_ON) and not agent.paused else ()


def _resume(agent: Agent, phase: Phase, _event: ResumeAsked) -> Step:
    after = replace(agent, paused=False, failures=0, trouble="")
    if isinstance(phase, Refused) and phase.reason is DeclineReason.POLICY:  # its people may have approved the plan
        return replace(after, phase=Preparing(phase.plan)), (FetchPlan(phase.plan),)
    if not isinstance(phase, COUNTED_ON) or not agent.paused:
        return after, ()
    if isinstance(phase, Declined) and phase.reason is DeclineReason.PAUSED:
        after = _rest(after)
    return after, _readiness(after)


def _stop(agent: Agent, phase: Phase, _event: StopAsked) -> Step:
    after = replace(agent, phase=Stopped())
    match phase:
        case Fetching(order) | Training(order) | Evaluating(order):
            return after, (CancelWork(), *_decline(order, DeclineReason.STOPPING, STOPPING))
        case Preparing(_, (Train() | Evaluate()) as order):
            return after, (CancelWork(), *_decline(order, DeclineReason.STOPPING, STOPPING))
        case Preparing() | Collecting() | Uploading() | Answering() | Reporting():
            # What was answered is answered again, the very same, by the next process. An update on disk is uploaded by the next process, if the round still waits for it then.
            return after, (CancelWork(),)
        case _:
            return after, ()


def _ignore(agent: Agent, _phase: Phase, _event: Event) -> Step:
    return agent, ()


# ---- the table ------------------------------------------------------------------------------------------------------

AT_REST = (Idle, Ready, Refused, Done, Declined, Complete)
LIVE = (*AT_REST, Holding, *WORKING)
EVENTS: tuple[type, ...] = (
    *(Standby, Prepare, Train, Mask, Evaluate, Finished),
    *(PlanPrepared, PlanRefused, ModelFetched, Trained, Uploaded, MaskAnswered, Evaluated, EvaluationDelivered),
    *(WorkFailed, WorkUnwanted, PauseAsked, ResumeAsked, StopAsked),
)

# Phase and event reach a handler with the types that its row names; one dict cannot tell the type checker so.
Handler = Callable[[Agent, Any, Any], Step]

TABLE: dict[tuple[type, type], Handler] = {
    **{(phase, Prepare): _prepare for phase in LIVE},
    **{(phase, Train): _round_order for phase in LIVE},
    **{(phase, Mask): _mask_order for phase in LIVE},
    **{(phase, Evaluate): _round_order for phase in LIVE},
    **{(phase, Finished): _finished for phase in LIVE},
    **{(phase, Standby): _standby_at_rest for phase in AT_REST},
    **{(phase, Standby): _standby_working for phase in (Fetching, Training, Evaluating)},
    (Preparing, Standby): _standby_preparing,
    (Collecting, Standby): _standby_collecting,
    (Uploading, Standby): _standby_delivering,
    (Holding, Standby): _standby_holding,
    (Answering, Standby): _standby_answering,
    (Reporting, Standby): _standby_delivering,
    (Preparing, PlanPrepared): _plan_prepared,
    (Preparing, PlanRefused): _plan_refused,
    (Fetching, ModelFetched): _model_for_a_round,
    (Collecting, ModelFetched): _model_of_a_finished_plan,
    (Training, Trained): _trained,
    (Uploading, Uploaded): _uploaded,
    (Answering, MaskAnswered): _mask_answered,
    (Evaluating, Evaluated): _evaluated,
    (Reporting, EvaluationDelivered): _evaluation_delivered,
    **{(phase, WorkFailed): _failed for phase in ON_AN_ORDER},
    **{(phase, WorkUnwanted): _unwanted for phase in ON_AN_ORDER if phase is not Answering},
    (Answering, WorkUnwanted): _step_unwanted,
    (Collecting, WorkFailed): _collecting_ended,
    (Collecting, WorkUnwanted): _collecting_ended,
    **{(phase, PauseAsked): _pause for phase in LIVE},
    **{(phase, ResumeAsked): _resume for phase in LIVE},
    **{(phase, StopAsked): _stop for phase in LIVE},
    **{(Stopped, event): _ignore for event in EVENTS},
}
