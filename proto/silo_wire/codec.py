"""Bytes and protobuf messages <-> frozen values. The one place, with `secure_codec`, `ledger_receipt` and `update_receipt`, that
reads fields of generated classes.

`..._from_wire` raises MalformedMessage for a missing, oversized or out-of-range field and returns values that need no
second check; `..._to_wire` is its inverse.
"""

from security.audit.signed_head import SignedHead
from security.errors import MalformedMessage
from security.identifiers import FederationName, SiloName
from silo_wire.canonical import Digest, digest_from_wire, digest_to_wire
from silo_wire.manifest import Manifest
from silo_wire.messages import (
    MAX_DETAIL_CHARACTERS,
    AgentPhase,
    DeclineReason,
    Evaluate,
    Evaluation,
    Finished,
    Mask,
    ModelHeader,
    Order,
    Prepare,
    RoundKey,
    Standby,
    StandbyReason,
    Train,
    TrainingSummary,
    UpdateHeader,
)
from silo_wire.update_receipt import head_from_wire, head_to_wire, silo_uri
from silo_wire.v1 import common_pb2, federation_pb2

NO_DIGEST = Digest("")

_REASONS: dict[StandbyReason, federation_pb2.StandbyReason.ValueType] = {
    StandbyReason.NO_PLAN: federation_pb2.STANDBY_REASON_NO_PLAN,
    StandbyReason.GATHERING: federation_pb2.STANDBY_REASON_GATHERING,
    StandbyReason.UPDATE_RECEIVED: federation_pb2.STANDBY_REASON_UPDATE_RECEIVED,
    StandbyReason.NOT_IN_COHORT: federation_pb2.STANDBY_REASON_NOT_IN_COHORT,
    StandbyReason.AGGREGATING: federation_pb2.STANDBY_REASON_AGGREGATING,
    StandbyReason.STOPPED: federation_pb2.STANDBY_REASON_STOPPED,
    StandbyReason.TRAINED: federation_pb2.STANDBY_REASON_TRAINED,
}
_DECLINES: dict[DeclineReason, federation_pb2.DeclineReason.ValueType] = {
    DeclineReason.POLICY: federation_pb2.DECLINE_REASON_POLICY,
    DeclineReason.TRAINING_FAILED: federation_pb2.DECLINE_REASON_TRAINING_FAILED,
    DeclineReason.DATA: federation_pb2.DECLINE_REASON_DATA,
    DeclineReason.INTEGRITY: federation_pb2.DECLINE_REASON_INTEGRITY,
    DeclineReason.PAUSED: federation_pb2.DECLINE_REASON_PAUSED,
    DeclineReason.STOPPING: federation_pb2.DECLINE_REASON_STOPPING,
}
_PHASES: dict[AgentPhase, federation_pb2.AgentPhase.ValueType] = {
    AgentPhase.FETCHING: federation_pb2.AGENT_PHASE_FETCHING,
    AgentPhase.TRAINING: federation_pb2.AGENT_PHASE_TRAINING,
    AgentPhase.UPLOADING: federation_pb2.AGENT_PHASE_UPLOADING,
    AgentPhase.EVALUATING: federation_pb2.AGENT_PHASE_EVALUATING,
    AgentPhase.MASKING: federation_pb2.AGENT_PHASE_MASKING,
}


def detail_from_wire(text: str) -> str:
    """A peer's free text, bounded and in one line, fit for a log or a terminal."""
    if len(text) > MAX_DETAIL_CHARACTERS:
        raise MalformedMessage(f"detail has {len(text)} characters, allowed are {MAX_DETAIL_CHARACTERS}")
    return "".join(character if character.isprintable() else " " for character in text)


def detail_to_wire(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)[:MAX_DETAIL_CHARACTERS]


def call_key(
    *, federation: FederationName, silo: SiloName, plan: Digest = NO_DIGEST, round_number: int = 0, attempt: int = 0
) -> common_pb2.CallKey:
    return common_pb2.CallKey(
        federation=federation, plan_digest=digest_to_wire(plan), round=round_number, attempt=attempt, silo=silo
    )


def round_call_key(key: RoundKey, silo: SiloName) -> common_pb2.CallKey:
    return common_pb2.CallKey(
        federation=key.federation, plan_digest=digest_to_wire(key.plan), round=key.round, attempt=key.attempt, silo=silo
    )


def round_key_from_wire(key: common_pb2.CallKey) -> RoundKey:
    return RoundKey(
        federation=key.federation,
        plan=digest_from_wire(key.plan_digest, "call key plan_digest"),
        round=key.round,
        attempt=key.attempt,
    )


def manifest_to_wire(manifest: Manifest) -> common_pb2.Manifest:
    return common_pb2.Manifest(
        layout_digest=digest_to_wire(manifest.layout_digest),
        total_bytes=manifest.total_bytes,
        chunk_bytes=manifest.chunk_bytes,
        chunk_digests=manifest.chunk_digests,
    )


def manifest_from_wire(message: common_pb2.Manifest) -> Manifest:
    return Manifest(
        digest_from_wire(message.layout_digest, "manifest layout_digest"),
        message.total_bytes,
        message.chunk_bytes,
        tuple(message.chunk_digests),
    )


def summary_to_wire(summary: TrainingSummary) -> federation_pb2.TrainingSummary:
    return federation_pb2.TrainingSummary(
        examples=summary.examples,
        loss_max=summary.loss_max,
        loss_min=summary.loss_min,
        loss_first=summary.loss_first,
        loss_last=summary.loss_last,
        optimizer_steps=summary.optimizer_steps,
        seconds=summary.seconds,
    )


def summary_from_wire(message: federation_pb2.TrainingSummary) -> TrainingSummary:
    return TrainingSummary(
        examples=message.examples,
        loss_max=message.loss_max,
        loss_min=message.loss_min,
        loss_first=message.loss_first,
        loss_last=message.loss_last,
        optimizer_steps=message.optimizer_steps,
        seconds=message.seconds,
    )


def update_header_to_wire(header: UpdateHeader, silo: SiloName) -> federation_pb2.UpdateHeader:
    return federation_pb2.UpdateHeader(
        key=round_call_key(header.key, silo),
        model_digest=digest_to_wire(header.model),
        manifest=manifest_to_wire(header.manifest),
        summary=summary_to_wire(header.summary),
        signature=header.signature,
        first_chunk=header.first_chunk,
        log=None if header.log is None else head_to_wire(header.log),
    )


def update_header_from_wire(message: federation_pb2.UpdateHeader) -> UpdateHeader:
    return UpdateHeader(
        key=round_key_from_wire(message.key),
        model=digest_from_wire(message.model_digest, "update header model_digest"),
        manifest=manifest_from_wire(message.manifest),
        summary=summary_from_wire(message.summary),
        signature=message.signature,
        first_chunk=message.first_chunk,
        log=log_from_wire(message),
    )


def log_from_wire(message: federation_pb2.UpdateHeader | federation_pb2.MaskedHeader) -> SignedHead | None:
    """How far the log of the silo of the key is, unchecked; None where the header does not say."""
    if not message.HasField("log"):
        return None
    key = message.key
    return head_from_wire(message.log, writer=silo_uri(FederationName(key.federation), SiloName(key.silo)))


def model_header_to_wire(header: ModelHeader) -> federation_pb2.ModelHeader:
    return federation_pb2.ModelHeader(
        manifest=manifest_to_wire(header.manifest), round=header.round, signature=header.signature
    )


def model_header_from_wire(message: federation_pb2.ModelHeader) -> ModelHeader:
    return ModelHeader(manifest=manifest_from_wire(message.manifest), round=message.round, signature=message.signature)


def evaluation_to_wire(
    key: RoundKey, silo: SiloName, model: Digest, evaluation: Evaluation
) -> federation_pb2.EvaluationReport:
    return federation_pb2.EvaluationReport(
        key=round_call_key(key, silo),
        model_digest=digest_to_wire(model),
        split=evaluation.split,
        examples=evaluation.examples,
        exact_matches=evaluation.exact_matches,
        executed=evaluation.executed,
        execution_matches=evaluation.execution_matches,
        loss_per_token=evaluation.loss_per_token,
        seconds=evaluation.seconds,
    )


def evaluation_from_wire(message: federation_pb2.EvaluationReport) -> Evaluation:
    return Evaluation(
        split=message.split,
        examples=message.examples,
        exact_matches=message.exact_matches,
        executed=message.executed,
        execution_matches=message.execution_matches,
        loss_per_token=message.loss_per_token,
        seconds=message.seconds,
    )


def decline_reason_to_wire(reason: DeclineReason) -> federation_pb2.DeclineReason.ValueType:
    return _DECLINES[reason]


def decline_reason_from_wire(value: federation_pb2.DeclineReason.ValueType) -> DeclineReason:
    for reason, number in _DECLINES.items():
        if number == value:
            return reason
    raise MalformedMessage(f"decline reason {value} is not known")


def phase_to_wire(phase: AgentPhase) -> federation_pb2.AgentPhase.ValueType:
    return _PHASES[phase]


def phase_from_wire(value: federation_pb2.AgentPhase.ValueType) -> AgentPhase:
    for phase, number in _PHASES.items():
        if number == value:
            return phase
    raise MalformedMessage(f"agent phase {value} is not known")


def order_to_wire(order: Order, silo: SiloName) -> federation_pb2.Notice:
    match order:
        case Standby(reason, detail):
            return federation_pb2.Notice(
                standby=federation_pb2.Standby(reason=_REASONS[reason], detail=detail_to_wire(detail))
            )
        case Prepare(plan):
            return federation_pb2.Notice(prepare=federation_pb2.Prepare(plan_digest=digest_to_wire(plan)))
        case Train():
            return federation_pb2.Notice(
                train=federation_pb2.Train(
                    key=round_call_key(order.key, silo),
                    model_digest=digest_to_wire(order.model),
                    seconds_left=order.seconds_left,
                    included_update=digest_to_wire(order.included_update) if order.included_update else b"",
                )
            )
        case Mask():
            from silo_wire import secure_codec  # here, not above: it brings numpy, which is for plans with masks alone

            return federation_pb2.Notice(mask=secure_codec.mask_to_wire(order, silo))
        case Evaluate():
            return federation_pb2.Notice(
                evaluate=federation_pb2.Evaluate(
                    key=round_call_key(order.key, silo),
                    model_digest=digest_to_wire(order.model),
                    seconds_left=order.seconds_left,
                )
            )
        case Finished():
            return federation_pb2.Notice(
                finished=federation_pb2.Finished(
                    plan_digest=digest_to_wire(order.plan),
                    rounds=order.rounds,
                    final_model_digest=digest_to_wire(order.final_model),
                    best_model_digest=digest_to_wire(order.best_model),
                )
            )


def order_from_wire(notice: federation_pb2.Notice) -> Order:
    match notice.WhichOneof("order"):
        case "standby":
            for reason, number in _REASONS.items():
                if number == notice.standby.reason:
                    return Standby(reason, detail_from_wire(notice.standby.detail))
            raise MalformedMessage(f"standby reason {notice.standby.reason} is not known: update the agent")
        case "prepare":
            return Prepare(digest_from_wire(notice.prepare.plan_digest, "prepare plan_digest"))
        case "train":
            return Train(
                key=round_key_from_wire(notice.train.key),
                model=digest_from_wire(notice.train.model_digest, "train model_digest"),
                seconds_left=seconds_from_wire(notice.train.seconds_left),
                included_update=digest_from_wire(notice.train.included_update, "train included_update")
                if notice.train.included_update
                else None,
            )
        case "mask":
            from silo_wire import secure_codec

            return secure_codec.mask_from_wire(notice.mask)
        case "evaluate":
            return Evaluate(
                key=round_key_from_wire(notice.evaluate.key),
                model=digest_from_wire(notice.evaluate.model_digest, "evaluate model_digest"),
                seconds_left=seconds_from_wire(notice.evaluate.seconds_left),
            )
        case "finished":
            return Finished(
                plan=digest_from_wire(notice.finished.plan_digest, "finished plan_digest"),
                rounds=notice.finished.rounds,
                final_model=digest_from_wire(notice.finished.final_model_digest, "finished final_model_digest"),
                best_model=digest_from_wire(notice.finished.best_model_digest, "finished best_model_digest"),
            )
        case _:
            raise MalformedMessage("notice carries no order that this agent knows: update the agent")


def seconds_from_wire(value: float) -> float:
    """How long an order still stands; raises MalformedMessage for what is no duration."""
    if not 0 <= value < float("inf"):  # also catches NaN
        raise MalformedMessage(f"seconds_left is {value}: it must be finite and not negative")
    return value
