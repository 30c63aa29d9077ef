"""How the agent begins an order under a prepared plan, once the plan allows it."""

from dataclasses import replace

from silo_agent.rounds.as_planned import second_model
from silo_agent.rounds.effects import (
    AnswerMask,
    DeclareTrained,
    FetchModel,
    JournalRoundModel,
    JournalUpdate,
    RecordRefusal,
    UploadUpdate,
)
from silo_agent.rounds.events import SavedUpdate
from silo_agent.rounds.handlers.declining import decline_order, decline_second_model
from silo_agent.rounds.handlers.leaving import leave
from silo_agent.rounds.states import Agent, Answering, Fetching, Holding, Phase, Step, Uploading
from silo_wire.messages import DeclineReason, Evaluate, Mask, Train


def begin(agent: Agent, phase: Phase, order: Train | Mask | Evaluate) -> Step:
    """Begin `order`, or decline it with the reason. The agent leaves `phase`, in which a plan is prepared."""
    if isinstance(order, Mask):
        return _begin_masking(agent, phase, order)
    assert agent.allows is not None, "a plan is prepared with what it allows"
    if unplanned := agent.allows.unplanned(order):
        after, effects = decline_order(agent, phase, order, DeclineReason.POLICY, unplanned)
        return after, (RecordRefusal(rule="as_planned", detail=unplanned), *effects)
    if isinstance(order, Evaluate) and not agent.allows.tells_scores:
        return decline_order(agent, phase, order, DeclineReason.POLICY, NO_SCORES_LEAVE)
    of = agent.allows.model_of(order)
    if second_model(agent.models, of, order.model):
        detail = f"{_SECOND_MODEL}: {order.model} for round {order.key.round}"
        after, effects = decline_order(agent, phase, order, DeclineReason.INTEGRITY, _SECOND_MODEL)
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
            return decline_second_model(agent, phase, order)
        if saved.masked:
            declared = DeclareTrained(key=saved.key, model=saved.model)
            return replace(agent, phase=Holding(saved)), (*leave(phase), declared)
        return replace(agent, phase=Uploading(order, saved)), (*leave(phase), UploadUpdate(saved))
    return replace(agent, phase=Fetching(order)), (*leave(phase), FetchModel(order))


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
        return decline_order(
            agent, phase, order, DeclineReason.TRAINING_FAILED, "the delta of this attempt is not here"
        )
    if saved.model != order.model:
        return decline_second_model(agent, phase, order)
    left = () if isinstance(phase, Holding) and phase.update.key == order.key else leave(phase)
    return replace(agent, phase=Answering(order, saved)), (*left, AnswerMask(order, saved))


_SECOND_MODEL = "another model stands in this one's place since an earlier order"
NO_SCORES_LEAVE = "no scores leave this silo: its people say so"
