"""Evidence and proof between values and bytes. Every fault is MalformedMessage; counts and sizes are bounded before anything is made.

A proof is one file, which anybody with the plan and the keys can examine (checked_chunk.examined).
"""

from collections.abc import Iterable, Mapping, Sequence

from google.protobuf.message import DecodeError

from security.errors import MalformedMessage
from security.identifiers import FederationName, SiloName
from security.pki.identity_key import SIGNATURE_BYTES
from security.secure_aggregation.evidence import (
    MAX_EVENTS,
    MAX_SLOT_NAME,
    MAX_SLOTS,
    Evidence,
    ModelState,
    SignedEvidence,
)
from security.secure_aggregation.messages import check_names
from security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes
from silo_wire.checked_chunk import Pieces, Proof, StateManifests
from silo_wire.codec import manifest_from_wire, manifest_to_wire
from silo_wire.manifest import MAX_CHUNK_BYTES, Manifest
from silo_wire.secure_codec import (
    MAX_COHORT,
    attempt_from_wire,
    attempt_to_wire,
    coordinator_event_from_bytes,
    coordinator_event_to_bytes,
    survivor_set_from_wire,
    survivor_set_to_wire,
)
from silo_wire.v1 import secure_aggregation_pb2 as pb

MAX_PROOF_BYTES = 1 << 30
"""Of 200 silos: a chunk and a manifest of each, which for the largest vector are 5 MiB, and what they dealt each other."""


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


def proof_to_bytes(proof: Proof) -> bytes:
    before, after, pieces = proof.before, proof.after, proof.pieces
    return pb.Proof(
        evidence=evidence_to_wire(proof.signed),
        chunk=proof.chunk,
        masked=[_vector(silo, proof.masked[silo], pieces.masked.get(silo)) for silo in sorted(proof.masked)],
        model_before=_vector("", before.model, None),
        master_before=_vector("", before.master, pieces.master),
        slots_before=[_vector(name, before.slots[name], pieces.slots.get(name)) for name in sorted(before.slots)],
        model_after=_vector("", after.model, pieces.model),
        master_after=_vector("", after.master, None),
        slots_after=[_vector(name, after.slots[name], None) for name in sorted(after.slots)],
    ).SerializeToString(deterministic=True)


def proof_from_bytes(data: bytes, federation: FederationName) -> Proof:
    """What `proof_to_bytes` gave; raises MalformedMessage. It proves nothing before it was `examined`."""
    if len(data) > MAX_PROOF_BYTES:
        raise MalformedMessage(f"a proof of {len(data)} bytes: at most {MAX_PROOF_BYTES} are allowed")
    try:
        message = pb.Proof.FromString(data)
    except DecodeError as error:
        raise MalformedMessage(f"a proof of {len(data)} bytes does not parse") from error
    if len(message.masked) > MAX_COHORT:
        raise MalformedMessage(f"a proof has {len(message.masked)} masked vectors: at most {MAX_COHORT} are allowed")
    masked = {SiloName(name): it for name, it in _named(message.masked).items()}
    check_names("proof", *masked)
    slots = _named(message.slots_before)
    return Proof(
        signed=evidence_from_wire(message.evidence, federation),
        chunk=message.chunk,
        masked={silo: manifest_from_wire(it.manifest) for silo, it in masked.items()},
        before=_manifests(message.model_before, message.master_before, message.slots_before),
        after=_manifests(message.model_after, message.master_after, message.slots_after),
        pieces=Pieces(
            masked={silo: it.piece for silo, it in masked.items()},
            master=message.master_before.piece,
            slots={name: it.piece for name, it in slots.items()},
            model=message.model_after.piece or None,
        ),
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


def _vector(name: str, manifest: Manifest, piece: bytes | None) -> pb.CheckedVector:
    return pb.CheckedVector(name=name, manifest=manifest_to_wire(manifest), piece=piece or b"")


def _manifests(model: pb.CheckedVector, master: pb.CheckedVector, slots: Sequence[pb.CheckedVector]) -> StateManifests:
    if len(slots) > MAX_SLOTS:
        raise MalformedMessage(f"a proof has {len(slots)} slots: at most {MAX_SLOTS} are allowed")
    _check_pieces((model, master, *slots))
    return StateManifests(
        model=manifest_from_wire(model.manifest),
        master=manifest_from_wire(master.manifest),
        slots={name: manifest_from_wire(it.manifest) for name, it in _named(slots).items()},
    )


def _named(vectors: Sequence[pb.CheckedVector]) -> Mapping[str, pb.CheckedVector]:
    names = [it.name for it in vectors]
    if names != sorted(set(names)) or any(len(name) > MAX_SLOT_NAME for name in names):
        raise MalformedMessage(f"a proof names {len(names)} vectors out of order, twice or by long names: sort by name")
    _check_pieces(vectors)
    return {it.name: it for it in vectors}


def _check_pieces(vectors: Iterable[pb.CheckedVector]) -> None:
    for it in vectors:
        if len(it.piece) > MAX_CHUNK_BYTES:
            raise MalformedMessage(
                f"a piece of a proof has {len(it.piece)} bytes: at most {MAX_CHUNK_BYTES} are allowed"
            )
