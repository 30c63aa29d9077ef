"""The instants at which tests kill a process, each named after what has just happened, or is just about to.

A point is a function of the product and a side of it: `before` and `after` a call, after the n-th `item` of an
asynchronous generator, or at its `end`, when it has nothing more to give. The product knows nothing of this; the
wrapper in tests/support/killed_process.py patches the function from outside. A function that was renamed fails loudly:
tests/crash/test_kill_points.py resolves every point.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Side = Literal["before", "after", "item", "end"]
Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`where` is `module:name` or `module:Class.name`; `only` looks at the call's positional arguments, `self`
    included.

    `of_closed`: its round is the one that was closed last, not the one under way.
    """

    meaning: str
    where: str
    side: Side
    only: Callable[[Arguments], bool] = lambda arguments: True
    of_closed: bool = False

    def place(self) -> tuple[Any, str, Callable[..., Any]]:
        """The object that holds the function, the function's name in it, and the function; AttributeError for none."""
        module, _, path = self.where.partition(":")
        *holders, name = path.split(".")
        holder: Any = importlib.import_module(module)
        for step in holders:
            holder = getattr(holder, step)
        function = getattr(holder, name)
        if inspect.isasyncgenfunction(function) != (self.side in ("item", "end")):
            raise TypeError(f"{self.where} and the side {self.side!r} do not go together")
        return holder, name, function


def _writes(*kinds: str) -> Callable[[Arguments], bool]:
    """Of SqlRoundStore.transition(self, state, records): it writes a record of each of these kinds."""
    return lambda arguments: set(kinds) <= {type(record).__name__ for record in arguments[2]}


def _enters(kind: str, *, with_record: str = "") -> Callable[[Arguments], bool]:
    """Of the same: the state that it saves is of this kind."""

    def entered(arguments: Arguments) -> bool:
        return type(arguments[1]).__name__ == kind and (not with_record or _writes(with_record)(arguments))

    return entered


def _transition(meaning: str, only: Callable[[Arguments], bool], *, of_closed: bool = False) -> Point:
    where = "lorica_coordinator.edges.database.round_store:SqlRoundStore.transition"
    return Point(meaning=meaning, where=where, side="after", only=only, of_closed=of_closed)


def _named(suffix: str) -> Callable[[Arguments], bool]:
    """Of a call whose first argument is a path."""
    return lambda arguments: arguments[0].name.endswith(suffix)


_ANSWERS = {
    "advertise keys": "advertisements",
    "share keys": "shared",
    "masked input": "inputs",
    "consistency check": "agreements",
    "unmasking": "reveals",
}


def _masks(phase: str, *, answers: int) -> Callable[[Arguments], bool]:
    """Of the same: secure aggregation is in this phase, and so many silos have answered."""

    def masked(arguments: Arguments) -> bool:
        secure = getattr(arguments[1], "secure", None)
        if not _enters("Masking")(arguments) or secure is None or secure.state.phase != phase:
            return False
        return len(getattr(secure.state, _ANSWERS[phase])) == answers

    return masked


COORDINATOR: Mapping[str, Point] = {
    "plan-begun": _transition("the plan's first state is saved", _writes("PlanBegun")),
    "silo-ready": _transition(
        "a silo's readiness is saved, the round waits for the others",
        lambda arguments: _enters("Gathering")(arguments) and bool(arguments[1].course.ready),
    ),
    "round-opened": _transition("the open round is saved, nobody was told", _writes("RoundOpened")),
    "mid-download": Point(
        meaning="some chunks of the round model are handed out",
        where="lorica_coordinator.edges.server.federation_servicer:FederationServicer.FetchModel",
        side="item",
    ),
    "mid-upload": Point(
        meaning="half of an update's chunks are spooled, not all",
        where="lorica_coordinator.edges.models.spool:Spool.write",
        side="after",
        only=lambda arguments: arguments[0].manifest.chunks / 2 <= arguments[0].held < arguments[0].manifest.chunks,
    ),
    "spool-durable": Point(
        meaning="a spool is whole and durable, the round does not count it yet",
        where="lorica_coordinator.edges.models.spool:Spool.commit",
        side="after",
    ),
    "update-accepted": _transition(
        "an update is counted, the others are missing", _enters("Collecting", with_record="UpdateAccepted")
    ),
    "update-not-acknowledged": Point(
        meaning="an update is counted and acted upon, its silo has no receipt",
        where="lorica_coordinator.service.transfers.uploads:Upload.commit",
        side="after",
    ),
    "aggregating-entered": _transition(
        "the last update is counted, no sum was begun", _enters("Aggregating", with_record="UpdateAccepted")
    ),
    "resumed": Point(
        meaning="a start after a kill has saved its first state",
        where="lorica_coordinator.service.loop.round_loop:RoundLoop.resume",
        side="after",
    ),
    "mid-aggregation": Point(
        meaning="a slab of the new model is computed",
        where="lorica_coordinator.edges.sums.reducers.plain:aggregate_slab",
        side="after",
    ),
    "model-written": Point(
        meaning="the new model's bytes are durable under a working name",
        where="lorica_coordinator.edges.models.model_store:ModelStore._publish",
        side="before",
    ),
    "mid-publication": Point(
        meaning="optimizer state and manifest have their names, the model has not",
        where="lorica_coordinator.edges.models.model_store:files.replace",
        side="after",
        only=_named(".manifest.json"),
    ),
    "model-published": Point(
        meaning="the new model has its name, the round does not know it",
        where="lorica_coordinator.edges.models.model_store:ModelStore._publish",
        side="after",
    ),
    "round-closed": _transition(
        "the round is closed with its model", _writes("ModelMade", "RoundClosed"), of_closed=True
    ),
    "spools-not-cleared": Point(
        meaning="the round is closed, its spools are still there",
        where="lorica_coordinator.edges.models.spool:Spools.discard",
        side="before",
        of_closed=True,
    ),
    "clearing-spools": Point(
        meaning="one of the round's spools is a spare now",
        where="lorica_coordinator.vectors.spare_files:SpareFiles.keep",
        side="after",
        only=lambda arguments: arguments[1].name.endswith(".delta"),
        of_closed=True,
    ),
    "clearing-models": Point(
        meaning="a model that nobody needs is a spare now, what belongs to it is still there",
        where="lorica_coordinator.vectors.spare_files:SpareFiles.keep",
        side="after",
        only=lambda arguments: arguments[1].name.endswith(".safetensors"),
        of_closed=True,
    ),
    "evaluation-opened": _transition(
        "the open evaluation is saved, nobody was told", _enters("Evaluating", with_record="EvaluationOpened")
    ),
    "evaluation-accepted": _transition(
        "a score is counted, the others are missing", _enters("Evaluating", with_record="EvaluationAccepted")
    ),
    "evaluation-closed": _transition("the scores are averaged and saved", _writes("EvaluationClosed"), of_closed=True),
    "plan-finished": _transition("the plan's end is saved, nobody was told", _enters("Finished")),
    "masking-entered": _transition(
        "all have trained, no attempt of secure aggregation was drawn",
        lambda arguments: _enters("Masking")(arguments) and arguments[1].secure is None,
    ),
    "attempt-opened": _transition("the attempt is saved, nobody was told", _masks("advertise keys", answers=0)),
    "keys-advertised": _transition("one silo's keys are saved, not acknowledged", _masks("advertise keys", answers=1)),
    "roster-made": _transition("the last silo's keys are saved, so the roster is", _masks("share keys", answers=0)),
    "keys-shared": _transition("one silo's boxes are saved", _masks("share keys", answers=1)),
    "boxes-delivered": _transition("all boxes are saved, nobody has any", _masks("masked input", answers=0)),
    "vector-accepted": _transition("one masked vector is counted", _masks("masked input", answers=1)),
    "survivors-fixed": _transition("the last vector is counted", _masks("consistency check", answers=0)),
    "survivors-signed": _transition("one silo has signed the survivors", _masks("consistency check", answers=1)),
    "shares-asked": _transition("the last silo has signed, no share was asked for", _masks("unmasking", answers=0)),
    "shares-revealed": _transition("one silo's shares are saved, it does not know", _masks("unmasking", answers=1)),
    "unmasked": _transition(
        "the last shares are saved, no vector was summed",
        lambda arguments: _enters("Aggregating")(arguments) and arguments[1].masked is not None,
    ),
    "mid-unmasking": Point(
        meaning="a slab of the mean delta is unmasked and applied",
        where="lorica_coordinator.edges.sums.next_model:apply_mean",
        side="after",
    ),
    "keys-not-announced": Point(
        meaning="a silo's keys are saved in the attempt, not as the newest that the others are told of",
        where="lorica_coordinator.edges.database.round_store:SqlRoundStore.announce",
        side="before",
    ),
    "evidence-not-kept": Point(
        meaning="the masked round's model is stored, nothing shows what made it",
        where="lorica_coordinator.edges.sums.round_evidence:RoundEvidence.make",
        side="before",
    ),
    "evidence-kept": Point(
        meaning="what made the model is kept, the round is not closed",
        where="lorica_coordinator.edges.sums.round_evidence:RoundEvidence.make",
        side="after",
    ),
    "verdict-not-taken": Point(
        meaning="a silo says which chunks of the model it found right, nobody has taken it down",
        where="lorica_coordinator.service.round_checks:RoundChecks.share",
        side="before",
    ),
    "log-not-cleared": Point(
        meaning="the masked round is closed, the database's log still has its shares",
        where="lorica_coordinator.edges.database.round_store:SqlRoundStore._clear_log",
        side="before",
        of_closed=True,
    ),
}


def _journalled(meaning: str, kind: str) -> Point:
    return Point(
        meaning=meaning,
        where="silo_agent.edges.disk.round_journal:RoundJournal.record",
        side="after",
        only=lambda arguments: type(arguments[1]).__name__ == kind,
    )


def _masking_journalled(meaning: str, kind: str) -> Point:
    return Point(
        meaning=meaning,
        where="silo_agent.edges.memory.masking_journal:MaskingJournal.append",
        side="after",
        only=lambda arguments: type(arguments[1]).__name__ == kind,
    )


SILO_AGENT: Mapping[str, Point] = {
    "plan-journalled": _journalled("the prepared plan is journalled", "JournalPlan"),
    "mid-download": Point(
        meaning="some chunks of the round model are kept",
        where="silo_agent.edges.disk.model_cache:PartialModel.append",
        side="after",
    ),
    "model-not-named": Point(
        meaning="all chunks of the round model are kept, under the name of a part",
        where="silo_agent.edges.disk.model_cache:PartialModel.finish",
        side="before",
    ),
    "model-journalled": _journalled("the round model is journalled", "JournalModel"),
    "mid-training": Point(
        meaning="some batches of the first epoch are done",
        where="silo_agent.training.local_trainer:accumulate_gradient",
        side="after",
    ),
    "epoch-done": Point(
        meaning="the first of two epochs is done, its checkpoint is not written",
        where="silo_agent.training.checkpoint:CheckpointFile.save",
        side="before",
    ),
    "checkpoint-written": Point(
        meaning="the checkpoint of the first of two epochs is written",
        where="silo_agent.training.checkpoint:CheckpointFile.save",
        side="after",
    ),
    "residual-not-named": Point(
        meaning="the update is durable, what rounding cut off it is written under the name of a part",
        where="silo_agent.training.update.residual:ResidualWriter.keep_for",
        side="before",
    ),
    "residual-named": Point(
        meaning="the update is durable and so is its residual, training has not returned",
        where="silo_agent.training.update.residual:ResidualWriter.keep_for",
        side="after",
    ),
    "update-written": Point(
        meaning="the update is durable, the journal does not know it",
        where="silo_agent.training.silo_trainer:SiloTrainer.train",
        side="after",
    ),
    "update-journalled": _journalled("the update is journalled, no byte of it has left", "JournalUpdate"),
    "mid-upload": Point(
        meaning="some chunks of the update have left",
        where="silo_agent.edges.wire.calls.uploads:_pieces",
        side="item",
    ),
    "last-chunk-sent": Point(
        meaning="the whole update has left, there is no receipt",
        where="silo_agent.edges.wire.calls.uploads:_pieces",
        side="end",
    ),
    "receipt-not-journalled": Point(
        meaning="the receipt is here, the journal does not know it",
        where="silo_agent.edges.wire.grpc_client:GrpcCoordinator.upload",
        side="after",
    ),
    "outcome-journalled": _journalled("the end of this silo's part is journalled", "JournalOutcome"),
    "mid-evaluation": Point(
        meaning="some answers are generated",
        where="silo_agent.training.evaluation:generated",
        side="after",
    ),
    "score-not-reported": Point(
        meaning="the score is known, nobody was told",
        where="silo_agent.edges.wire.grpc_client:GrpcCoordinator.report_evaluation",
        side="before",
    ),
    "score-not-journalled": Point(
        meaning="the score is reported, the journal does not know it",
        where="silo_agent.edges.wire.grpc_client:GrpcCoordinator.report_evaluation",
        side="after",
    ),
    "root-journalled": _masking_journalled("the root of the attempt is journalled, no key has left", "OpenAttempt"),
    "roster-journalled": _masking_journalled("the roster is journalled, nothing is dealt", "Roster"),
    "boxes-journalled": _masking_journalled("what the silo deals is journalled, no box has left", "SharedKeys"),
    "delivery-journalled": _masking_journalled("the boxes are journalled, nothing is masked", "Delivery"),
    "vector-written": Point(
        meaning="the masked vector is durable, the journal does not know it",
        where="silo_agent.edges.workshop.workshop:Workshop.mask",
        side="after",
    ),
    "vector-journalled": _masking_journalled("the masked vector is journalled, not announced", "VectorMasked"),
    "answer-not-marked": Point(
        meaning="the memory has the answer, lineages.json is one change behind",
        where="silo_agent.edges.memory.lineages:Lineages.mark",
        side="before",
        only=lambda arguments: arguments[1].plans[0].answered,
    ),
    "pieces-fetched": Point(
        meaning="what a chunk of the round model is made again with is here, nothing is checked",
        where="silo_agent.edges.wire.grpc_client:GrpcCoordinator.fetch_pieces",
        side="after",
    ),
    "verdict-shared": Point(
        meaning="the others know which chunks this silo found right, it has not accepted the model",
        where="silo_agent.edges.wire.grpc_client:GrpcCoordinator.share_verdict",
        side="after",
    ),
    "model-not-accepted": Point(
        meaning="every chunk of the round model is found right, that it is accepted is not saved",
        where="silo_agent.edges.memory.accepted_models:AcceptedModels.save",
        side="before",
    ),
    "model-accepted": Point(
        meaning="that the round model is accepted is saved, no byte of it is fetched",
        where="silo_agent.edges.memory.accepted_models:AcceptedModels.save",
        side="after",
    ),
    "survivors-journalled": _masking_journalled("the survivors are journalled, not signed", "SurvivorSet"),
    "answer-remembered": Point(
        meaning="that shares are shown is remembered, not yet journalled",
        where="silo_agent.edges.memory.masking_journal:MaskingJournal.remember",
        side="after",
        only=lambda arguments: any(plan.answered for plan in arguments[1].plans),
    ),
    "shares-journalled": _masking_journalled("that shares are shown is journalled, none has left", "UnmaskRequest"),
    "shares-delivered": Point(
        meaning="the shares are delivered, nothing is erased",
        where="silo_agent.edges.wire.grpc_client:GrpcCoordinator.answer_mask",
        side="after",
        only=lambda arguments: type(arguments[2]).__name__ == "Reveal",
    ),
    "erasing": Point(
        meaning="the attempt's journal is overwritten and still there",
        where="silo_agent.edges.memory.masking_journal:write_at",
        side="after",
        only=lambda arguments: not any(arguments[1]),
    ),
    "erased": Point(
        meaning="everything of the attempt is erased, the round goes on without this silo",
        where="silo_agent.edges.memory.masking_journal:MaskingJournal.erase",
        side="after",
    ),
}

PROGRAMS: Mapping[str, Mapping[str, Point]] = {"coordinator": COORDINATOR, "silo-agent": SILO_AGENT}
