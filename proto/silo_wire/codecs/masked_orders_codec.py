"""Orders of masked rounds and the answers to them <-> `federation.proto`, around the messages of `secure_codec`.

That an answer is of the key's silo is checked here; that the key is of the connection, by whoever receives it.
"""

from collections.abc import Sequence

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import public_key_bytes, public_key_from_bytes
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    Delivery,
    Reveal,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
)
from lorica_security.secure_aggregation.roster import Roster
from silo_wire.canonical import digest_from_wire, digest_to_wire
from silo_wire.codecs.common_codec import (
    manifest_from_wire,
    manifest_to_wire,
    round_call_key,
    round_key_from_wire,
    seconds_from_wire,
)
from silo_wire.codecs.renewal import succession_to_wire, successions_from_wire
from silo_wire.codecs.secure_codec import (
    MAX_COHORT,
    MAX_NAME_CHARACTERS,
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
    reveal_from_wire,
    reveal_to_wire,
    roster_from_wire,
    roster_to_wire,
    shared_keys_from_wire,
    shared_keys_to_wire,
    survivor_set_from_wire,
    survivor_set_to_wire,
    unmask_request_from_wire,
    unmask_request_to_wire,
)
from silo_wire.codecs.update_receipt import head_to_wire
from silo_wire.codecs.updates_codec import log_from_wire
from silo_wire.messages import Mask, MaskAnswer, MaskedHeader, RoundKey
from silo_wire.v1 import common_pb2, federation_pb2

# --- orders, answers, uploads -----------------------------------------------------------------------------------------


def mask_to_wire(order: Mask, silo: SiloName) -> federation_pb2.Mask:
    message = federation_pb2.Mask(
        key=round_call_key(order.key, silo),
        model_digest=digest_to_wire(order.model),
        seconds_left=order.seconds_left,
        attempt=attempt_to_wire(order.attempt),
    )
    match order.message:
        case None:
            message.advertise.CopyFrom(federation_pb2.AdvertiseKeys(seen=order.seen or b""))
        case Roster() as roster:
            message.roster.CopyFrom(roster_to_wire(roster))
            steps = dict(order.successions)
            for member, identity in order.identities:
                successions = map(succession_to_wire, steps.get(member, ()))
                message.identities.add(silo=member, key=public_key_bytes(identity), successions=successions)
        case Delivery() as delivery:
            message.delivery.CopyFrom(delivery_to_wire(delivery))
        case SurvivorSet() as survivors:
            message.survivors.CopyFrom(survivor_set_to_wire(survivors))
        case UnmaskRequest() as request:
            message.unmask.CopyFrom(unmask_request_to_wire(request))
    return message


def mask_from_wire(message: federation_pb2.Mask) -> Mask:
    federation, plan = message.key.federation, message.key.plan_digest
    return Mask(
        key=round_key_from_wire(message.key),
        model=digest_from_wire(message.model_digest, "mask model_digest"),
        seconds_left=seconds_from_wire(message.seconds_left),
        attempt=attempt_from_wire(message.attempt, federation=federation, plan=plan),
        message=_step_from_wire(message, federation=federation, plan=plan),
        seen=message.advertise.seen or None,
        identities=_identities_from_wire(message.identities),
        successions=tuple(
            (checked_silo(item.silo), successions_from_wire(item.successions))
            for item in message.identities
            if item.successions
        ),
    )


def _identities_from_wire(
    identities: Sequence[federation_pb2.SiloIdentity],
) -> tuple[tuple[SiloName, Ed25519PublicKey], ...]:
    bounded("identity keys beside a roster", identities, MAX_COHORT)
    return tuple((checked_silo(item.silo), public_key_from_bytes(item.key)) for item in identities)


def _step_from_wire(
    message: federation_pb2.Mask, *, federation: str, plan: bytes
) -> Roster | Delivery | SurvivorSet | UnmaskRequest | None:
    match message.WhichOneof("step"):
        case "advertise":
            return None
        case "roster":
            return roster_from_wire(message.roster, federation=federation, plan=plan)
        case "delivery":
            return delivery_from_wire(message.delivery)
        case "survivors":
            return survivor_set_from_wire(message.survivors)
        case "unmask":
            return unmask_request_from_wire(message.unmask)
        case _:
            raise MalformedMessage("mask order asks for no step that this agent knows: update the agent")


def mask_answer_to_wire(key: RoundKey, silo: SiloName, answer: MaskAnswer) -> federation_pb2.MaskAnswer:
    call = round_call_key(key, silo)
    match answer:
        case Advertisement():
            return federation_pb2.MaskAnswer(key=call, advertisement=advertisement_to_wire(answer))
        case SharedKeys():
            return federation_pb2.MaskAnswer(key=call, shared_keys=shared_keys_to_wire(answer))
        case Complaint():
            return federation_pb2.MaskAnswer(key=call, complaint=complaint_to_wire(answer))
        case Agreement():
            return federation_pb2.MaskAnswer(key=call, agreement=agreement_to_wire(answer))
        case Reveal():
            return federation_pb2.MaskAnswer(key=call, reveal=reveal_to_wire(answer))


def mask_answer_from_wire(message: federation_pb2.MaskAnswer) -> MaskAnswer:
    answer: MaskAnswer
    match message.WhichOneof("answer"):
        case "advertisement":
            answer = advertisement_from_wire(
                message.advertisement, federation=message.key.federation, plan=message.key.plan_digest
            )
        case "shared_keys":
            answer = shared_keys_from_wire(message.shared_keys)
        case "complaint":
            answer = complaint_from_wire(message.complaint)
        case "agreement":
            answer = agreement_from_wire(message.agreement)
        case "reveal":
            answer = reveal_from_wire(message.reveal)
        case _:
            raise MalformedMessage("mask answer holds no message that this coordinator knows: update the coordinator")
    _check_sender(answer.silo, message.key)
    return answer


def masked_header_to_wire(header: MaskedHeader, silo: SiloName) -> federation_pb2.MaskedHeader:
    return federation_pb2.MaskedHeader(
        key=round_call_key(header.key, silo),
        masked_input=masked_input_to_wire(header.masked),
        manifest=manifest_to_wire(header.manifest),
        first_chunk=header.first_chunk,
        log=None if header.log is None else head_to_wire(header.log),
    )


def masked_header_from_wire(message: federation_pb2.MaskedHeader) -> MaskedHeader:
    masked = masked_input_from_wire(message.masked_input)
    _check_sender(masked.silo, message.key)
    return MaskedHeader(
        key=round_key_from_wire(message.key),
        masked=masked,
        manifest=manifest_from_wire(message.manifest),
        first_chunk=message.first_chunk,
        log=log_from_wire(message),
    )


def _check_sender(named: SiloName, key: common_pb2.CallKey) -> None:
    if named != key.silo:
        raise MalformedMessage(
            f"silo {key.silo[:MAX_NAME_CHARACTERS]!r} sends a message of silo {named}: only its own is taken"
        )
