"""Evidence and proof between values and bytes. Every fault is MalformedMessage; counts and sizes are bounded before
anything is made.

A proof is one file, which anybody with the plan and the keys can examine (checked_chunk.examined).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import SIGNATURE_BYTES
from lorica_security.secure_aggregation.messages import check_names
from lorica_security.secure_aggregation.model_evidence.evidence import (
    MAX_EVENTS,
    MAX_SLOT_NAME,
    MAX_SLOTS,
    Evidence,
    ModelState,
    SignedEvidence,
)
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes
from silo_wire.checkable_round import CheckableRound, Pieces, Proof, StateManifests
from silo_wire.codecs.common_codec import manifest_from_wire, manifest_to_wire
from silo_wire.codecs.secure_codec import (
    MAX_COHORT,
    attempt_from_wire,
    attempt_to_wire,
    survivor_set_from_wire,
    survivor_set_to_wire,
    verdict_from_wire,
    verdict_to_wire,
)
from silo_wire.codecs.secure_journals_codec import coordinator_event_from_bytes, coordinator_event_to_bytes
from silo_wire.manifest import MAX_CHUNK_BYTES, Manifest
from silo_wire.v1 import secure_aggregation_pb2 as pb

MAX_CHECKABLE_BYTES: Final = 1 << 28
"""Evidence of a round of 200 silos fits: a manifest of each, and the shares that they dealt each other."""
MAX_PROOF_BYTES: Final = 1 << 30
"""The same with a chunk of each vector."""

M = TypeVar("M", bound=Message)


def evidence_to_wire(signed: SignedEvidence) -> pb.Evidence:
    evidence = signed.evidence
    return pb.Evidence(
        plan_digest=evidence.attempt.plan,
        attempt=attempt_to_wire(evidence.attempt),
        survivors=survivor_set_to_wire(evidence.survivors),
        before=_state_to_wire(evidence.before),
        after=_state_to_wire(evidence.after),
        tail=evidence.tail,
        journal=[coordinator_event_to_bytes(event) for event in evidence.journal],
        signature=signed.signature,
    )


def evidence_from_wire(message: pb.Evidence, federation: FederationName) -> SignedEvidence:
    """Raises MalformedMessage; checks no signature."""
    check_bytes("evidence", DIGEST_BYTES, plan_digest=message.plan_digest)
    check_bytes("evidence", SIGNATURE_BYTES, signature=message.signature)
    if len(message.journal) > MAX_EVENTS:
        raise MalformedMessage(f"evidence has {len(message.journal)} events: at most {MAX_EVENTS} are allowed")
    evidence = Evidence(
        attempt=attempt_from_wire(message.attempt, federation=federation, plan=message.plan_digest),
        survivors=survivor_set_from_wire(message.survivors),
        before=_state_from_wire(message.before),
        after=_state_from_wire(message.after),
        tail=tuple(message.tail),
        journal=tuple(coordinator_event_from_bytes(event, federation) for event in message.journal),
    )
    return SignedEvidence(evidence=evidence, signature=message.signature)


def checkable_to_bytes(checkable: CheckableRound) -> bytes:
    return _checkable_to_wire(checkable).SerializeToString(deterministic=True)


def checkable_from_bytes(data: bytes, federation: FederationName) -> CheckableRound:
    """Raises MalformedMessage; checks no signature, and not that the manifests are those of the evidence."""
    return _checkable_from_wire(_parsed(pb.CheckableRound, data, "evidence", MAX_CHECKABLE_BYTES), federation)


def verdicts_to_bytes(verdicts: Iterable[Verdict]) -> bytes:
    """As a coordinator keeps them."""
    return pb.Verdicts(verdicts=map(verdict_to_wire, verdicts)).SerializeToString(deterministic=True)


def verdicts_from_bytes(data: bytes) -> tuple[Verdict, ...]:
    """What `verdicts_to_bytes` gave; raises MalformedMessage, and checks no signature."""
    message = _parsed(pb.Verdicts, data, "verdicts", MAX_CHECKABLE_BYTES)
    return tuple(map(verdict_from_wire, message.verdicts))


def proof_to_bytes(proof: Proof) -> bytes:
    return pb.Proof(
        round=_checkable_to_wire(proof.checkable), chunk=proof.chunk, pieces=proof.pieces.in_order
    ).SerializeToString(deterministic=True)


def proof_from_bytes(data: bytes, federation: FederationName) -> Proof:
    """What `proof_to_bytes` gave; raises MalformedMessage. It proves nothing before it was `examined`."""
    message = _parsed(pb.Proof, data, "a proof", MAX_PROOF_BYTES)
    checkable = _checkable_from_wire(message.round, federation)
    if any(len(piece) > MAX_CHUNK_BYTES for piece in message.pieces):
        raise MalformedMessage(f"a proof has a piece of more than the {MAX_CHUNK_BYTES} bytes allowed")
    return Proof(checkable=checkable, chunk=message.chunk, pieces=Pieces.of(checkable, message.pieces))


def _parsed(kind: type[M], data: bytes, what: str, most: int) -> M:
    if len(data) > most:
        raise MalformedMessage(f"{what} of {len(data)} bytes: at most {most} are allowed")
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"{what} of {len(data)} bytes does not parse") from error


def _checkable_to_wire(checkable: CheckableRound) -> pb.CheckableRound:
    before, after = checkable.before, checkable.after
    return pb.CheckableRound(
        evidence=evidence_to_wire(checkable.signed),
        masked=_named_to_wire(checkable.masked),
        model_before=manifest_to_wire(before.model),
        master_before=manifest_to_wire(before.master),
        slots_before=_named_to_wire(before.slots),
        model_after=manifest_to_wire(after.model),
        master_after=manifest_to_wire(after.master),
        slots_after=_named_to_wire(after.slots),
    )


def _checkable_from_wire(message: pb.CheckableRound, federation: FederationName) -> CheckableRound:
    if len(message.masked) > MAX_COHORT:
        raise MalformedMessage(f"evidence has {len(message.masked)} masked vectors: at most {MAX_COHORT} are allowed")
    masked = {SiloName(name): manifest for name, manifest in _named_from_wire(message.masked).items()}
    check_names("evidence", *masked)
    return CheckableRound(
        signed=evidence_from_wire(message.evidence, federation),
        masked=masked,
        before=_manifests(message.model_before, message.master_before, message.slots_before),
        after=_manifests(message.model_after, message.master_after, message.slots_after),
    )


def _state_to_wire(state: ModelState) -> pb.ModelState:
    slots = [pb.SlotState(name=name, vector=vector) for name, vector in state.slots]
    return pb.ModelState(steps=state.steps, model=state.model, master=state.master, slots=slots)


def _state_from_wire(message: pb.ModelState) -> ModelState:
    if len(message.slots) > MAX_SLOTS:
        raise MalformedMessage(f"model state has {len(message.slots)} slots: at most {MAX_SLOTS} are allowed")
    return ModelState(
        steps=message.steps,
        model=message.model,
        master=message.master,
        slots=tuple((slot.name, slot.vector) for slot in message.slots),
    )


def _manifests(model: Any, master: Any, slots: Sequence[pb.NamedManifest]) -> StateManifests:
    if len(slots) > MAX_SLOTS:
        raise MalformedMessage(f"evidence has {len(slots)} slots: at most {MAX_SLOTS} are allowed")
    return StateManifests(
        model=manifest_from_wire(model), master=manifest_from_wire(master), slots=_named_from_wire(slots)
    )


def _named_to_wire(manifests: Mapping[SiloName, Manifest] | Mapping[str, Manifest]) -> list[pb.NamedManifest]:
    return [
        pb.NamedManifest(name=name, manifest=manifest_to_wire(manifest)) for name, manifest in sorted(manifests.items())
    ]


def _named_from_wire(vectors: Sequence[pb.NamedManifest]) -> Mapping[str, Manifest]:
    names = [it.name for it in vectors]
    if names != sorted(set(names)) or any(len(name) > MAX_SLOT_NAME for name in names):
        raise MalformedMessage(
            f"evidence names {len(names)} vectors out of order, twice or by long names: sort by name"
        )
    return {it.name: manifest_from_wire(it.manifest) for it in vectors}
