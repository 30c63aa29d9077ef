"""The journals of both sides of secure aggregation, and what a silo remembers, as bytes for a disk.

A digest, then the message: what was damaged or cut off reads as nothing at all. Every fault is MalformedMessage.
"""

from typing import Any

from google.protobuf.message import DecodeError, Message

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName
from lorica_security.secure_aggregation.attempt import MAX_NUMBER
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.keys.key_agreement import ROOT_BYTES
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import MAX_ELEMENTS
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    Delivery,
    MaskedInput,
    Reveal,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
    check_names,
)
from lorica_security.secure_aggregation.parameters import NoiseTerms, Terms
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo.memory import MAX_ANNOUNCED, MAX_PLANS, PlanMemory, SiloMemory
from lorica_security.secure_aggregation.transcript import check_bytes
from silo_wire.canonical import DIGEST_BYTES, digest_of, digest_to_wire
from silo_wire.codecs.groups_codec import groups_from_wire, groups_to_wire
from silo_wire.codecs.secure_codec import (
    MAX_COHORT,
    M,
    advertisement_from_wire,
    advertisement_to_wire,
    agreement_from_wire,
    agreement_to_wire,
    attempt_from_wire,
    attempt_to_wire,
    bounded,
    checked_silo,
    complaint_from_wire,
    complaint_to_wire,
    delivery_from_wire,
    delivery_to_wire,
    masked_input_from_wire,
    masked_input_to_wire,
    ranges_from_wire,
    ranges_to_wire,
    reveal_from_wire,
    reveal_to_wire,
    roster_from_wire,
    roster_to_wire,
    seen_from_wire,
    seen_to_wire,
    shared_keys_from_wire,
    shared_keys_to_wire,
    silos_from_wire,
    survivor_set_from_wire,
    survivor_set_to_wire,
    unmask_request_from_wire,
    unmask_request_to_wire,
)
from silo_wire.manifest import MAX_TENSORS
from silo_wire.v1 import secure_aggregation_pb2 as pb

_PHASES = frozenset(state.phase for state in coordinator_states.STATES)


# --- journals and memory ----------------------------------------------------------------------------------------------


def _stored(message: Message) -> bytes:
    raw = message.SerializeToString()
    return digest_to_wire(digest_of(raw)) + raw


def _read(kind: type[M], data: bytes) -> M:
    raw = memoryview(data)[DIGEST_BYTES:]
    if digest_to_wire(digest_of(raw)) != data[:DIGEST_BYTES]:
        raise MalformedMessage(f"a stored {kind.DESCRIPTOR.name} of {len(data)} bytes was damaged or cut off")
    try:
        return kind.FromString(bytes(raw))
    except DecodeError as error:
        raise MalformedMessage(f"a stored {kind.DESCRIPTOR.name} of {len(data)} bytes does not parse") from error


def event_to_bytes(event: silo_events.Event) -> bytes:
    """One event of a silo's journal. That of an OpenAttempt holds its root: keep it as secret, and erase it as soon."""
    return _stored(_event_to_stored(event))


def _event_to_stored(event: silo_events.Event) -> pb.SiloEvent:
    match event:
        case silo_events.OpenAttempt():
            opening = pb.SiloOpening(
                attempt=attempt_to_wire(event.attempt),
                model_digest=event.model,
                tensors=event.tensors,
                root=bytes(event.root.buffer),
                seen=seen_to_wire(event.seen),
            )
            return pb.SiloEvent(plan_digest=event.attempt.plan, opening=opening)
        case Roster():
            return pb.SiloEvent(plan_digest=event.attempt.plan, roster=roster_to_wire(event))
        case SharedKeys():
            return pb.SiloEvent(shared_keys=shared_keys_to_wire(event))
        case Delivery():
            return pb.SiloEvent(delivery=delivery_to_wire(event))
        case silo_events.VectorMasked():
            return pb.SiloEvent(masked_vector=event.vector)
        case SurvivorSet():
            return pb.SiloEvent(survivors=survivor_set_to_wire(event))
        case UnmaskRequest():
            return pb.SiloEvent(unmask=unmask_request_to_wire(event))
        case silo_events.AttemptEnded():
            return pb.SiloEvent(plan_digest=event.attempt.plan, ended=attempt_to_wire(event.attempt))


def event_from_bytes(data: bytes, federation: FederationName) -> silo_events.Event:
    """The event that `event_to_bytes` was given, of a silo of `federation`; raises MalformedMessage for anything
    else."""
    message = _read(pb.SiloEvent, data)
    match message.WhichOneof("event"):
        case "opening":
            return _opening_from_stored(message.opening, federation=federation, plan=message.plan_digest)
        case "roster":
            return roster_from_wire(message.roster, federation=federation, plan=message.plan_digest)
        case "shared_keys":
            return shared_keys_from_wire(message.shared_keys)
        case "delivery":
            return delivery_from_wire(message.delivery)
        case "masked_vector":
            return silo_events.VectorMasked(message.masked_vector)
        case "survivors":
            return survivor_set_from_wire(message.survivors)
        case "unmask":
            return unmask_request_from_wire(message.unmask)
        case "ended":
            return silo_events.AttemptEnded(
                attempt_from_wire(message.ended, federation=federation, plan=message.plan_digest)
            )
        case _:
            raise MalformedMessage("a stored SiloEvent holds no event that this version knows")


def _opening_from_stored(
    message: pb.SiloOpening, *, federation: FederationName, plan: bytes
) -> silo_events.OpenAttempt:
    bounded("tensors of an attempt", message.tensors, MAX_TENSORS)
    if any(not 1 <= elements <= MAX_ELEMENTS for elements in message.tensors):
        raise MalformedMessage(f"an attempt names a tensor whose elements are not 1 to {MAX_ELEMENTS}")
    check_bytes("attempt", ROOT_BYTES, root=message.root)
    return silo_events.OpenAttempt(
        attempt=attempt_from_wire(message.attempt, federation=federation, plan=plan),
        model=message.model_digest,
        tensors=tuple(message.tensors),
        root=Secret(message.root),
        seen=seen_from_wire(message.seen),
    )


def memory_to_bytes(memory: SiloMemory, *, lineages: int = 0) -> bytes:
    """`lineages`: how many changes of lineages.json this file is to know of."""
    return _stored(
        pb.SiloMemory(
            plans=[
                pb.PlanMemory(
                    plan_digest=it.plan,
                    round=it.round,
                    number=it.number,
                    answered=it.answered,
                )
                for it in memory.plans
            ],
            sequence=memory.sequence,
            announced=memory.announced,
            seen=seen_to_wire(memory.seen),
            acknowledged=seen_to_wire(memory.acknowledged),
            dealt=seen_to_wire(memory.dealt),
            lineages=lineages,
        )
    )


def known_lineages(data: bytes) -> int:
    """What `memory_to_bytes` was given with the memory; raises MalformedMessage."""
    known = _read(pb.SiloMemory, data).lineages
    if known >= MAX_NUMBER:
        raise MalformedMessage(f"memory knows of {known} changes of lineages.json: allowed are 0 to {MAX_NUMBER - 1}")
    return known


def memory_from_bytes(data: bytes) -> SiloMemory:
    """What `memory_to_bytes` was given; raises MalformedMessage for anything else, no bytes at all among it."""
    message = _read(pb.SiloMemory, data)
    bounded("plans of a memory", message.plans, MAX_PLANS)
    for item in message.plans:
        check_bytes("memory", DIGEST_BYTES, plan_digest=item.plan_digest)
        if not (1 <= item.round < MAX_NUMBER and 1 <= item.number < MAX_NUMBER):
            raise MalformedMessage(
                f"memory of round {item.round} attempt {item.number}: allowed are 1 to {MAX_NUMBER - 1}"
            )
    if len({item.plan_digest for item in message.plans}) != len(message.plans):
        raise MalformedMessage("memory names a plan twice")
    if message.sequence >= MAX_NUMBER:
        raise MalformedMessage(f"memory has sequence number {message.sequence}: allowed are 0 to {MAX_NUMBER - 1}")
    bounded("advertisements of a memory", message.announced, MAX_ANNOUNCED)
    others = (*message.seen, *message.acknowledged, *message.dealt)
    for digest in (*message.announced, *(item.advertisement for item in others)):
        check_bytes("memory", DIGEST_BYTES, advertisement=digest)
    return SiloMemory(
        tuple(
            PlanMemory(
                plan=item.plan_digest,
                round=item.round,
                number=item.number,
                answered=item.answered,
            )
            for item in message.plans
        ),
        message.sequence,
        tuple(message.announced),
        seen_from_wire(message.seen),
        seen_from_wire(message.acknowledged),
        seen_from_wire(message.dealt),
    )


def coordinator_event_to_bytes(event: coordinator_events.Event) -> bytes:
    """One event of the coordinator's journal; raises MalformedMessage for more silos than a delivery can be sent to."""
    return _stored(_coordinator_event_to_stored(event))


def _coordinator_event_to_stored(event: coordinator_events.Event) -> pb.CoordinatorEvent:
    match event:
        case coordinator_events.OpenAttempt():
            bounded("those invited", event.invited, MAX_COHORT)
            opening = pb.CoordinatorOpening(
                attempt=attempt_to_wire(event.attempt), terms=_terms_to_stored(event.terms), invited=event.invited
            )
            return pb.CoordinatorEvent(plan_digest=event.attempt.plan, opening=opening)
        case Advertisement():
            return pb.CoordinatorEvent(plan_digest=event.attempt.plan, advertisement=advertisement_to_wire(event))
        case SharedKeys():
            return pb.CoordinatorEvent(shared_keys=shared_keys_to_wire(event))
        case Complaint():
            return pb.CoordinatorEvent(complaint=complaint_to_wire(event))
        case MaskedInput():
            return pb.CoordinatorEvent(masked_input=masked_input_to_wire(event))
        case Agreement():
            return pb.CoordinatorEvent(agreement=agreement_to_wire(event))
        case Reveal():
            return pb.CoordinatorEvent(reveal=reveal_to_wire(event))
        case coordinator_events.SiloDropped():
            return pb.CoordinatorEvent(dropped=pb.SiloDropped(silo=event.silo, detail=event.detail))
        case coordinator_events.PhaseClosed():
            return pb.CoordinatorEvent(phase_closed=event.phase)


def coordinator_event_from_bytes(data: bytes, federation: FederationName) -> coordinator_events.Event:
    """What `coordinator_event_to_bytes` was given, by a coordinator of `federation`; raises MalformedMessage
    otherwise."""
    message = _read(pb.CoordinatorEvent, data)
    plan = message.plan_digest
    match message.WhichOneof("event"):
        case "opening":
            return coordinator_events.OpenAttempt(
                attempt=attempt_from_wire(message.opening.attempt, federation=federation, plan=plan),
                terms=_terms_from_stored(message.opening.terms, federation),
                invited=silos_from_wire("those invited", message.opening.invited),
            )
        case "advertisement":
            return advertisement_from_wire(message.advertisement, federation=federation, plan=plan)
        case "shared_keys":
            return shared_keys_from_wire(message.shared_keys)
        case "complaint":
            return complaint_from_wire(message.complaint)
        case "masked_input":
            return masked_input_from_wire(message.masked_input)
        case "agreement":
            return agreement_from_wire(message.agreement)
        case "reveal":
            return reveal_from_wire(message.reveal)
        case "dropped":
            silo = checked_silo(message.dropped.silo)
            check_names("dropped silo", silo)
            return coordinator_events.SiloDropped(silo, message.dropped.detail)
        case "phase_closed":
            if message.phase_closed not in _PHASES:
                raise MalformedMessage(f"secure aggregation has no phase {message.phase_closed[:80]!r}")
            return coordinator_events.PhaseClosed(message.phase_closed)
        case _:
            raise MalformedMessage("a stored CoordinatorEvent holds no event that this version knows")


def _terms_to_stored(terms: Terms) -> pb.Terms:
    return pb.Terms(
        model_digest=terms.model,
        ranges=ranges_to_wire(terms.ranges),
        release_groups=groups_to_wire(terms.link),
        min_cohort=terms.min_cohort,
        min_survivors=terms.min_survivors,
        colluders=terms.colluders,
        threshold=terms.threshold,
        **_noise_to_stored(terms.noise),
    )


def _terms_from_stored(message: pb.Terms, federation: FederationName) -> Terms:
    check_bytes("terms", DIGEST_BYTES, model_digest=message.model_digest)
    return Terms(
        model=message.model_digest,
        ranges=ranges_from_wire(message.ranges),
        link=groups_from_wire(message.release_groups, federation),
        min_cohort=message.min_cohort,
        min_survivors=message.min_survivors,
        colluders=message.colluders,
        threshold=message.threshold if message.HasField("threshold") else None,
        noise=_noise_from_stored(message),
    )


def _noise_to_stored(noise: NoiseTerms | None) -> dict[str, Any]:
    if noise is None:
        return {}
    return {
        "noise_multiplier": noise.noise_multiplier,
        "noise_makers": noise.makers,
        "noise_reach": noise.reach,
        "noise_grain": noise.grain,
    }


def _noise_from_stored(message: pb.Terms) -> NoiseTerms | None:
    if not message.noise_multiplier:
        return None
    return NoiseTerms(
        noise_multiplier=message.noise_multiplier,
        makers=message.noise_makers if message.HasField("noise_makers") else None,
        reach=message.noise_reach or 1.0,
        grain=message.noise_grain,
    )
