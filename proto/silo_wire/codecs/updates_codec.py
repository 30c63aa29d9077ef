"""What silos send of a round, masks apart <-> `federation.proto`: updates, evaluations, why they decline."""

from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.canonical import Digest, digest_from_wire, digest_to_wire
from silo_wire.codecs.common_codec import manifest_from_wire, manifest_to_wire, round_call_key, round_key_from_wire
from silo_wire.codecs.update_receipt import head_from_wire, head_to_wire, silo_uri
from silo_wire.messages import (
    AgentPhase,
    DeclineReason,
    Evaluation,
    ModelHeader,
    RoundKey,
    TrainingSummary,
    UpdateHeader,
)
from silo_wire.v1 import federation_pb2

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
