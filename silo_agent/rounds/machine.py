"""The agent's one transition table: (phase, event) -> handler, `step(agent, event) -> (agent, effects)`.

Orders are levels: whatever arrives is what the coordinator wants now, so an order repeated after a reconnection changes
nothing, another order replaces the work under way, and an agent that was restarted needs no history but its journal.

    Idle, Ready, Refused, Done, Declined, Complete   rest: nothing is under way
    Preparing, Collecting                            work on a plan, and on the model that a finished plan leaves
    Fetching, Training, Uploading                    work on a Train order
    Fetching, Training, Holding, Answering           the same under masks: the delta stays, Mask orders follow
    Fetching, Evaluating, Reporting                  work on an Evaluate order
    Stopped                                          the end: whatever comes is ignored

Rules that the handlers keep:
- Work on a round begins only under a plan that was prepared in this process, hence allowed by policy.
- What the plan does not have is declined: rounds beyond its own, scores at other times or, under masks, in the clear.
- One attempt, one model: a second model for the same attempt is declined, whichever of the two is right. Scores of a
  round, and under masks its attempts, are of one model for good.
- An update on disk is uploaded again, never trained again: the same bytes or none. A private one serves every attempt
  at its round that begins with its model: to train again would be another release of the records, and cost again.
- What is being delivered is seen through: its receipt may be overtaken by the next order, and only the call itself says
  whether it counted. The newest order waits as `then`.
- What secure aggregation left is erased as soon as nothing of it can be asked for again: when the shares are delivered,
  when this silo declines, when an order says that the attempt is over.
- Paused, no new round is taken; the round that this silo already works on goes on.
- Readiness follows every decline, or the coordinator waits for it; after FAILURES_IN_A_ROW it is withheld, so that a
  silo that cannot do the work does not spin the rounds of all.
"""

from collections.abc import Callable
from typing import Any

from lorica_security.errors import StateError
from silo_agent.rounds.activity import shown
from silo_agent.rounds.effects import (
    JournalActivity,
    JournalModel,
    JournalOutcome,
    JournalPlan,
    JournalRoundModel,
    JournalUpdate,
    RecordRefusal,
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
    StopAsked,
    Trained,
    Uploaded,
    WorkFailed,
    WorkUnwanted,
)
from silo_agent.rounds.handlers.mask_orders import mask_order
from silo_agent.rounds.handlers.plan_orders import plan_finished, prepare
from silo_agent.rounds.handlers.results import (
    collecting_ended,
    evaluation_delivered,
    mask_answered,
    model_for_a_round,
    model_of_a_finished_plan,
    plan_prepared,
    plan_refused,
    step_unwanted,
    update_uploaded,
    work_evaluated,
    work_failed,
    work_trained,
    work_unwanted,
)
from silo_agent.rounds.handlers.round_orders import round_order
from silo_agent.rounds.handlers.standby_orders import (
    standby_answering,
    standby_at_rest,
    standby_collecting,
    standby_delivering,
    standby_holding,
    standby_preparing,
    standby_working,
)
from silo_agent.rounds.handlers.wishes import ignore, pause, resume, stop
from silo_agent.rounds.states import (
    DELIVERING,
    ON_AN_ORDER,
    WORKING,
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
    Preparing,
    Ready,
    Refused,
    Reporting,
    Step,
    Stopped,
    Training,
    Uploading,
)
from silo_wire.messages import Evaluate, Finished, Mask, Prepare, Standby, Train


def step(agent: Agent, event: Event) -> Step:
    """The next agent and what to do, journal effects first.

    Raises StateError, and changes nothing, for a result of work that is not under way.
    """
    handler = TABLE.get((type(agent.phase), type(event)))
    if handler is None:
        raise StateError(f"{type(event).__name__} does not fit {type(agent.phase).__name__}: nothing was changed")
    after, effects = handler(agent, agent.phase, event)
    if isinstance(event, _ENDS) and isinstance(agent.phase, DELIVERING) and agent.phase.then is not None:
        then = agent.phase.then  # the order that came meanwhile
        after, more = TABLE[type(after.phase), type(then)](after, after.phase, then)
        effects = (*effects, *more)
    before_shown, after_shown = shown(agent.phase), shown(after.phase)
    if after_shown != before_shown:
        effects = (after_shown, *effects)
    journal = tuple(effect for effect in effects if isinstance(effect, _JOURNAL))
    return after, journal + tuple(effect for effect in effects if not isinstance(effect, _JOURNAL))


_JOURNAL = (JournalPlan, JournalModel, JournalRoundModel, JournalUpdate, JournalOutcome, JournalActivity, RecordRefusal)


_ENDS = (Uploaded, MaskAnswered, EvaluationDelivered, WorkFailed, WorkUnwanted)
"""Results that end a delivery."""


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
    **{(phase, Prepare): prepare for phase in LIVE},
    **{(phase, Train): round_order for phase in LIVE},
    **{(phase, Mask): mask_order for phase in LIVE},
    **{(phase, Evaluate): round_order for phase in LIVE},
    **{(phase, Finished): plan_finished for phase in LIVE},
    **{(phase, Standby): standby_at_rest for phase in AT_REST},
    **{(phase, Standby): standby_working for phase in (Fetching, Training, Evaluating)},
    (Preparing, Standby): standby_preparing,
    (Collecting, Standby): standby_collecting,
    (Uploading, Standby): standby_delivering,
    (Holding, Standby): standby_holding,
    (Answering, Standby): standby_answering,
    (Reporting, Standby): standby_delivering,
    (Preparing, PlanPrepared): plan_prepared,
    (Preparing, PlanRefused): plan_refused,
    (Fetching, ModelFetched): model_for_a_round,
    (Collecting, ModelFetched): model_of_a_finished_plan,
    (Training, Trained): work_trained,
    (Uploading, Uploaded): update_uploaded,
    (Answering, MaskAnswered): mask_answered,
    (Evaluating, Evaluated): work_evaluated,
    (Reporting, EvaluationDelivered): evaluation_delivered,
    **{(phase, WorkFailed): work_failed for phase in ON_AN_ORDER},
    **{(phase, WorkUnwanted): work_unwanted for phase in ON_AN_ORDER if phase is not Answering},
    (Answering, WorkUnwanted): step_unwanted,
    (Collecting, WorkFailed): collecting_ended,
    (Collecting, WorkUnwanted): collecting_ended,
    **{(phase, PauseAsked): pause for phase in LIVE},
    **{(phase, ResumeAsked): resume for phase in LIVE},
    **{(phase, StopAsked): stop for phase in LIVE},
    **{(Stopped, event): ignore for event in EVENTS},
}
