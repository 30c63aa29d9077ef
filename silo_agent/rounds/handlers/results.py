"""Results of work that was under way."""

from dataclasses import replace

from lorica_security.errors import StateError
from silo_agent.rounds.effects import (
    DeclareReadiness,
    DeclareTrained,
    EndMasking,
    FetchModel,
    JournalModel,
    JournalPlan,
    JournalUpdate,
    Outcome,
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
    PlanPrepared,
    PlanRefused,
    Trained,
    Uploaded,
    WorkFailed,
    WorkUnwanted,
)
from silo_agent.rounds.handlers.beginning import begin
from silo_agent.rounds.handlers.declining import declining
from silo_agent.rounds.handlers.leaving import at_rest, leave, outcome_of, readiness_of, unreadiness_of
from silo_agent.rounds.handlers.round_orders import round_order
from silo_agent.rounds.states import (
    Agent,
    Answering,
    Collecting,
    Complete,
    Declined,
    Done,
    Evaluating,
    Fetching,
    Holding,
    Idle,
    Phase,
    Preparing,
    Refused,
    Reporting,
    Step,
    Training,
    Uploading,
)
from silo_wire.messages import DeclineReason, Evaluate, Finished, Mask, Train


def plan_prepared(agent: Agent, phase: Preparing, event: PlanPrepared) -> Step:
    """The plan is allowed: go on with the order that waited for it."""
    _require(event.plan == phase.plan, event)
    agent = replace(agent, prepared=event.plan, allows=event.allows)
    journal = JournalPlan(event.plan)
    left: Phase = Idle() if phase.held is None else Holding(phase.held)
    match phase.then:
        case Train(key=key) as order if phase.held is not None and phase.held.key == key:
            after, effects = round_order(replace(agent, phase=left), left, order)
        case Train() | Mask() | Evaluate() as order:
            after, effects = begin(agent, left, order)
        case Finished() as order:
            after, effects = replace(agent, phase=Collecting(order)), (*leave(left), FetchModel(order))
        case None if phase.held is not None:
            after, effects = replace(agent, phase=left), readiness_of(agent)
        case None:
            after, effects = at_rest(agent), readiness_of(agent)
    return after, (journal, *effects)


def plan_refused(agent: Agent, phase: Preparing, event: PlanRefused) -> Step:
    """The plan is refused, and with it the order that waited for it."""
    _require(event.plan == phase.plan, event)
    refused = Refused(plan=event.plan, reason=event.reason, detail=event.detail, told=event.told)
    after = replace(agent, phase=refused)
    unready = DeclareReadiness(plan=event.plan, ready=False, reason=event.told)
    erase = () if phase.held is None else (EndMasking(phase.held.key),)
    match phase.then:
        case Train() | Mask() | Evaluate() as order:
            return after, (*declining(order, event.reason, event.told, event.detail), *erase, unready)
        case Finished():
            return after, erase
        case None:
            return after, (*erase, unready)


def model_for_a_round(agent: Agent, phase: Fetching, event: ModelFetched) -> Step:
    """The model is here: train or evaluate."""
    _require(event.model == phase.order.model, event)
    journal = JournalModel(phase.order.key.plan, event.model)
    match phase.order:
        case Train() as order:  # which writes over the update before
            return replace(agent, phase=Training(order), saved=None), (journal, RunTraining(order))
        case Evaluate() as order:
            return replace(agent, phase=Evaluating(order)), (journal, RunEvaluation(order))


def model_of_a_finished_plan(agent: Agent, phase: Collecting, event: ModelFetched) -> Step:
    """The model of a finished plan is here."""
    _require(event.model == phase.order.best_model, event)
    return replace(agent, phase=Complete(phase.order)), (JournalModel(phase.order.plan, event.model),)


def work_trained(agent: Agent, phase: Training, event: Trained) -> Step:
    """The update is on disk: upload it, or hold it to be masked."""
    update = event.update
    _require((update.key, update.model) == (phase.order.key, phase.order.model), event)
    if update.masked:
        after = replace(agent, phase=Holding(update), saved=update)
        return after, (JournalUpdate(update), DeclareTrained(key=update.key, model=update.model))
    after = replace(agent, phase=Uploading(phase.order, update), saved=update)
    return after, (JournalUpdate(update), UploadUpdate(update))


def mask_answered(agent: Agent, phase: Answering, event: MaskAnswered) -> Step:
    """A step of secure aggregation is answered; with the shares it is over."""
    _require(event.key == phase.order.key, event)
    if not event.revealed:
        return replace(agent, phase=Holding(phase.update)), ()
    after = replace(agent, phase=Done(phase.order), failures=0, trouble="")
    done = (outcome_of(phase.order, Outcome.UPLOADED), EndMasking(phase.order.key))
    return after, (*done, *unreadiness_of(after))


def update_uploaded(agent: Agent, phase: Uploading, event: Uploaded) -> Step:
    """The update is delivered."""
    _require(event.key == phase.order.key, event)
    after = replace(agent, phase=Done(phase.order), failures=0, trouble="")
    return after, (outcome_of(phase.order, Outcome.UPLOADED), *unreadiness_of(after))


def work_evaluated(agent: Agent, phase: Evaluating, event: Evaluated) -> Step:
    """The scores are here: report them."""
    _require(event.key == phase.order.key, event)
    after = replace(agent, phase=Reporting(phase.order, event.evaluation))
    return after, (ReportEvaluation(phase.order, event.evaluation),)


def evaluation_delivered(agent: Agent, phase: Reporting, event: EvaluationDelivered) -> Step:
    """The scores are delivered."""
    _require(event.key == phase.order.key, event)
    after = replace(agent, phase=Done(phase.order, phase.evaluation), failures=0, trouble="")
    return after, (outcome_of(phase.order, Outcome.EVALUATED), *unreadiness_of(after))


def work_failed(
    agent: Agent, phase: Fetching | Training | Uploading | Answering | Evaluating | Reporting, event: WorkFailed
) -> Step:
    """Decline the order; after a few failures in a row, readiness is withheld."""
    # Scores that the silo's own rules keep here are no failure: it trains on.
    kept_here = isinstance(phase, Evaluating) and event.reason is DeclineReason.POLICY
    after = replace(
        agent,
        phase=Declined(order=phase.order, reason=event.reason, told=event.told),
        failures=agent.failures if kept_here else agent.failures + 1,
        trouble=event.told,
    )
    erase = (EndMasking(phase.order.key),) if isinstance(phase, Answering) else ()
    told = declining(phase.order, event.reason, event.told, event.detail)
    return after, (*told, *erase, *unreadiness_of(after))


def collecting_ended(agent: Agent, phase: Collecting, _event: WorkFailed | WorkUnwanted) -> Step:
    """The model of a finished plan did not come: that is no failure of a round."""
    return replace(agent, phase=Complete(phase.order)), ()


def work_unwanted(
    agent: Agent, phase: Fetching | Training | Uploading | Evaluating | Reporting, event: WorkUnwanted
) -> Step:
    """The coordinator wants this work no more."""
    after = at_rest(agent)
    return after, (outcome_of(phase.order, Outcome.CLOSED, event.detail), *unreadiness_of(after))


def step_unwanted(agent: Agent, phase: Answering, event: WorkUnwanted) -> Step:
    """That step alone: what is asked next may fit."""
    return replace(agent, phase=Holding(phase.update)), ()


def _require(holds: bool, event: Event) -> None:
    if not holds:
        raise StateError(f"{type(event).__name__} is of other work than is under way: nothing was changed")
