"""Secure aggregation's messages <-> protobuf, as `codec` does it for the others; and the journals of both sides as bytes.

Where the wire leaves out federation and plan they are the caller's, from the call key. All that the protocol signs or
hashes comes out as it went in, doubles bit for bit. Whoever receives a silo's answer checks that the key beside it is that
of the connection; that the answer is of the key's silo is checked here.

`..._to_bytes` is for a disk: a digest, then the message, so that what was damaged or cut off reads as nothing at all.
Every fault is MalformedMessage. Counts are bounded before anything is made of them.
"""

from collections.abc import Sequence, Sized
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from google.protobuf.message import DecodeError, Message

from security.errors import MalformedMessage
from security.identifiers import NAME_RULE, FederationName, SiloName
from security.pki.identity_key import public_key_bytes, public_key_from_bytes
from security.secure_aggregation import coordinator_machine, silo_machine
from security.secure_aggregation.attempt import MAX_NUMBER, Attempt
from security.secure_aggregation.fixed_point import MAX_ELEMENTS, FixedPoint, Ranges, TensorRange
from security.secure_aggregation.key_agreement import ROOT_BYTES
from security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    Dealing,
    DealtLine,
    Delivery,
    MaskedInput,
    MaskKeyShare,
    Reveal,
    RevealedShare,
    SealedShare,
    SelfMaskShare,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
    check_names,
)
from security.secure_aggregation.pair_secret import PairCopy
from security.secure_aggregation.parameters import NoiseTerms, Parameters, Terms
from security.secure_aggregation.roster import Roster
from security.secure_aggregation.secret import Secret
from security.secure_aggregation.silo_memory import MAX_ANNOUNCED, MAX_PLANS, PlanMemory, Seen, SiloMemory
from security.secure_aggregation.transcript import check_bytes
from security.secure_aggregation.verdicts import Verdict
from silo_wire.canonical import DIGEST_BYTES, digest_from_wire, digest_of, digest_to_wire
from silo_wire.codec import (
    log_from_wire,
    manifest_from_wire,
    manifest_to_wire,
    round_call_key,
    round_key_from_wire,
    seconds_from_wire,
)
from silo_wire.groups_codec import groups_from_wire, groups_to_wire
from silo_wire.manifest import MAX_TENSORS
from silo_wire.messages import Mask, MaskAnswer, MaskedHeader, RoundKey
from silo_wire.renewal import succession_to_wire, successions_from_wire
from silo_wire.update_receipt import head_to_wire
from silo_wire.v1 import common_pb2, federation_pb2
from silo_wire.v1 import secure_aggregation_pb2 as pb

MAX_COHORT = 200
"""A delivery grows with the square of the cohort: for 200 silos it has 4.3 MB, and transport.MAX_MESSAGE_BYTES is 5 MiB."""

_MAX_NAME_CHARACTERS = 63
_PHASES = frozenset(state.phase for state in coordinator_machine.STATES)

M = TypeVar("M", bound=Message)


def _bounded(what: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise MalformedMessage(f"{what} are {len(items)}: at most {most} are allowed")


def _silo(text: str) -> SiloName:
    """A name that is short enough to be quoted; whether it is one the value that it goes into checks."""
    _name_of("silo", text)
    return SiloName(text)


def _name_of(what: str, text: str) -> None:
    if len(text) > _MAX_NAME_CHARACTERS:
        raise MalformedMessage(f"{what} name has {len(text)} characters: use {NAME_RULE}")


# --- attempt, parameters ----------------------------------------------------------------------------------------------


def attempt_to_wire(attempt: Attempt) -> pb.Attempt:
    return pb.Attempt(round=attempt.round, number=attempt.number, id=attempt.id)


def attempt_from_wire(message: pb.Attempt, *, federation: str, plan: bytes) -> Attempt:
    _name_of("federation", federation)
    return Attempt(
        federation=FederationName(federation), plan=plan, round=message.round, number=message.number, id=message.id
    )


def _ranges_to_wire(ranges: Ranges) -> pb.Ranges:
    return pb.Ranges(
        weight_cap=ranges.weight_cap,
        elements=[tensor.elements for tensor in ranges.tensors],
        bounds=[tensor.bound for tensor in ranges.tensors],
    )


def _ranges_from_wire(message: pb.Ranges) -> Ranges:
    _bounded("tensor ranges", message.elements, MAX_TENSORS)
    if len(message.elements) != len(message.bounds):
        raise MalformedMessage(
            f"ranges have {len(message.elements)} sizes and {len(message.bounds)} bounds: each tensor has one of both"
        )
    return Ranges(
        weight_cap=message.weight_cap,
        tensors=tuple(TensorRange(size, bound) for size, bound in zip(message.elements, message.bounds, strict=True)),
    )


def parameters_to_wire(parameters: Parameters) -> pb.Parameters:
    return pb.Parameters(
        cohort=parameters.cohort,
        threshold=parameters.threshold,
        colluders=parameters.colluders,
        min_survivors=parameters.min_survivors,
        least_sum=parameters.least_sum,
        levels=parameters.fixed_point.levels,
        saturation_limit=parameters.fixed_point.saturation_limit,
        ranges=_ranges_to_wire(parameters.fixed_point.ranges),
    )


def parameters_from_wire(message: pb.Parameters) -> Parameters:
    return Parameters(
        cohort=message.cohort,
        threshold=message.threshold,
        colluders=message.colluders,
        min_survivors=message.min_survivors,
        least_sum=message.least_sum,
        fixed_point=FixedPoint(
            cohort=message.cohort,
            levels=message.levels,
            saturation_limit=message.saturation_limit,
            ranges=_ranges_from_wire(message.ranges),
        ),
    )


# --- 1. advertise keys ------------------------------------------------------------------------------------------------


def _keys_to_wire(advertisement: Advertisement) -> pb.MemberKeys:
    return pb.MemberKeys(
        silo=advertisement.silo,
        mask_key=advertisement.mask_key,
        box_key=advertisement.box_key,
        signature=advertisement.signature,
        seen=_seen_to_wire(advertisement.seen),
    )


def _keys_from_wire(message: pb.MemberKeys, attempt: Attempt) -> Advertisement:
    return Advertisement(
        attempt=attempt,
        silo=_silo(message.silo),
        mask_key=message.mask_key,
        box_key=message.box_key,
        signature=message.signature,
        seen=_seen_from_wire(message.seen),
    )


def _seen_to_wire(seen: Seen) -> list[pb.SeenKeys]:
    return [pb.SeenKeys(silo=silo, advertisement=digest) for silo, digest in seen]


def _seen_from_wire(message: Sequence[pb.SeenKeys]) -> Seen:
    _bounded("silos whose keys were seen", message, MAX_COHORT)
    return tuple((_silo(item.silo), item.advertisement) for item in message)


def advertisement_to_wire(advertisement: Advertisement) -> pb.Advertisement:
    return pb.Advertisement(attempt=attempt_to_wire(advertisement.attempt), keys=_keys_to_wire(advertisement))


def advertisement_from_wire(message: pb.Advertisement, *, federation: str, plan: bytes) -> Advertisement:
    return _keys_from_wire(message.keys, attempt_from_wire(message.attempt, federation=federation, plan=plan))


# --- 2. share keys ----------------------------------------------------------------------------------------------------


def roster_to_wire(roster: Roster) -> pb.Roster:
    return pb.Roster(
        attempt=attempt_to_wire(roster.attempt),
        model_digest=roster.model,
        release_groups=roster.link,
        parameters=parameters_to_wire(roster.parameters),
        members=[_keys_to_wire(member) for member in roster.members],
    )


def roster_from_wire(message: pb.Roster, *, federation: str, plan: bytes) -> Roster:
    _bounded("roster members", message.members, MAX_COHORT)
    attempt = attempt_from_wire(message.attempt, federation=federation, plan=plan)
    return Roster(
        attempt=attempt,
        model=message.model_digest,
        link=message.release_groups,
        parameters=parameters_from_wire(message.parameters),
        members=tuple(_keys_from_wire(member, attempt) for member in message.members),
    )


def _dealing_to_wire(dealing: Dealing) -> pb.Dealing:
    return pb.Dealing(
        silo=dealing.silo,
        seed_commitment=dealing.seed_commitment,
        lines=[pb.DealtLine(self_mask=it.self_mask, mask_key=it.mask_key, box=it.box) for it in dealing.lines],
        signature=dealing.signature,
    )


def _dealing_from_wire(message: pb.Dealing, roster: bytes) -> Dealing:
    _bounded("lines of a dealing", message.lines, MAX_COHORT)
    return Dealing(
        roster=roster,
        silo=_silo(message.silo),
        seed_commitment=message.seed_commitment,
        lines=tuple(DealtLine(self_mask=it.self_mask, mask_key=it.mask_key, box=it.box) for it in message.lines),
        signature=message.signature,
    )


def shared_keys_to_wire(shared: SharedKeys) -> pb.SharedKeys:
    return pb.SharedKeys(
        roster=shared.dealing.roster,
        dealing=_dealing_to_wire(shared.dealing),
        boxes=[_sealed_share_to_wire(share, share.holder) for share in shared.boxes],
    )


def _sealed_share_to_wire(share: SealedShare, peer: SiloName) -> pb.SealedShare:
    copy = None
    if share.copy is not None:
        it = share.copy
        copy = pb.PairCopy(ciphertext=it.ciphertext, covered=it.covered, commitment=it.commitment)
    return pb.SealedShare(peer=peer, box=share.box, ciphertext=share.ciphertext, copy=copy)


def _sealed_share_from_wire(message: pb.SealedShare, *, dealer: SiloName, holder: SiloName) -> SealedShare:
    copy = None
    if message.HasField("copy"):
        it = message.copy
        copy = PairCopy(ciphertext=it.ciphertext, covered=it.covered, commitment=it.commitment)
    return SealedShare(dealer=dealer, holder=holder, ciphertext=message.ciphertext, box=message.box, copy=copy)


def shared_keys_from_wire(message: pb.SharedKeys) -> SharedKeys:
    _bounded("boxes of shared keys", message.boxes, MAX_COHORT)
    dealing = _dealing_from_wire(message.dealing, message.roster)
    return SharedKeys(
        dealing=dealing,
        boxes=tuple(
            _sealed_share_from_wire(share, dealer=dealing.silo, holder=_silo(share.peer)) for share in message.boxes
        ),
    )


# --- 3. masked input --------------------------------------------------------------------------------------------------


def delivery_to_wire(delivery: Delivery) -> pb.Delivery:
    return pb.Delivery(
        roster=delivery.roster,
        holder=delivery.holder,
        dealings=[_dealing_to_wire(dealing) for dealing in delivery.dealings],
        boxes=[_sealed_share_to_wire(share, share.dealer) for share in delivery.boxes],
    )


def delivery_from_wire(message: pb.Delivery) -> Delivery:
    _bounded("dealings of a delivery", message.dealings, MAX_COHORT)
    _bounded("boxes of a delivery", message.boxes, MAX_COHORT)
    holder = _silo(message.holder)
    check_names("delivery", holder)
    return Delivery(
        roster=message.roster,
        holder=holder,
        dealings=tuple(_dealing_from_wire(dealing, message.roster) for dealing in message.dealings),
        boxes=tuple(_sealed_share_from_wire(share, dealer=_silo(share.peer), holder=holder) for share in message.boxes),
    )


def complaint_to_wire(complaint: Complaint) -> pb.Complaint:
    return pb.Complaint(
        roster=complaint.roster,
        silo=complaint.silo,
        dealer=complaint.dealer,
        key=complaint.key,
        signature=complaint.signature,
    )


def complaint_from_wire(message: pb.Complaint) -> Complaint:
    return Complaint(
        roster=message.roster,
        silo=_silo(message.silo),
        dealer=_silo(message.dealer),
        key=message.key,
        signature=message.signature,
    )


def masked_input_to_wire(masked: MaskedInput) -> pb.MaskedInput:
    return pb.MaskedInput(
        roster=masked.roster,
        dealings=masked.dealings,
        silo=masked.silo,
        words=masked.words,
        vector=masked.vector,
        signature=masked.signature,
    )


def masked_input_from_wire(message: pb.MaskedInput) -> MaskedInput:
    return MaskedInput(
        roster=message.roster,
        dealings=message.dealings,
        silo=_silo(message.silo),
        words=message.words,
        vector=message.vector,
        signature=message.signature,
    )


# --- 4. consistency check ---------------------------------------------------------------------------------------------


def survivor_set_to_wire(survivors: SurvivorSet) -> pb.SurvivorSet:
    return pb.SurvivorSet(
        roster=survivors.roster, dealings=survivors.dealings, silos=survivors.silos, inputs=survivors.inputs
    )


def survivor_set_from_wire(message: pb.SurvivorSet) -> SurvivorSet:
    _bounded("masked inputs of survivors", message.inputs, MAX_COHORT)
    return SurvivorSet(
        roster=message.roster,
        dealings=message.dealings,
        silos=_silos_from_wire("survivors", message.silos),
        inputs=tuple(message.inputs),
    )


def _silos_from_wire(what: str, names: Sequence[str]) -> tuple[SiloName, ...]:
    _bounded(what, names, MAX_COHORT)
    return tuple(_silo(name) for name in names)


def agreement_to_wire(agreement: Agreement) -> pb.Agreement:
    return pb.Agreement(
        roster=agreement.roster, silo=agreement.silo, survivors=agreement.survivors, signature=agreement.signature
    )


def agreement_from_wire(message: pb.Agreement) -> Agreement:
    return Agreement(
        roster=message.roster,
        silo=_silo(message.silo),
        survivors=message.survivors,
        signature=message.signature,
    )


# --- 5. unmasking -----------------------------------------------------------------------------------------------------


def unmask_request_to_wire(request: UnmaskRequest) -> pb.UnmaskRequest:
    return pb.UnmaskRequest(
        roster=request.roster, agreements=[agreement_to_wire(agreement) for agreement in request.agreements]
    )


def unmask_request_from_wire(message: pb.UnmaskRequest) -> UnmaskRequest:
    _bounded("agreements of an unmask request", message.agreements, MAX_COHORT)
    return UnmaskRequest(
        roster=message.roster, agreements=tuple(agreement_from_wire(agreement) for agreement in message.agreements)
    )


def reveal_to_wire(reveal: Reveal) -> pb.Reveal:
    return pb.Reveal(
        roster=reveal.roster,
        silo=reveal.silo,
        shares=[_share_to_wire(share) for share in reveal.shares],
        signature=reveal.signature,
    )


def reveal_from_wire(message: pb.Reveal) -> Reveal:
    _bounded("shares of a reveal", message.shares, MAX_COHORT)
    return Reveal(
        roster=message.roster,
        silo=_silo(message.silo),
        shares=tuple(_share_from_wire(share) for share in message.shares),
        signature=message.signature,
    )


def _share_to_wire(revealed: RevealedShare) -> pb.RevealedShare:
    match revealed:
        case SelfMaskShare():
            return pb.RevealedShare(dealer=revealed.dealer, self_mask=revealed.share, salt=revealed.salt)
        case MaskKeyShare():
            return pb.RevealedShare(dealer=revealed.dealer, mask_key=revealed.share, salt=revealed.salt)


def _share_from_wire(message: pb.RevealedShare) -> RevealedShare:
    dealer = _silo(message.dealer)
    match message.WhichOneof("share"):
        case "self_mask":
            return SelfMaskShare(dealer=dealer, share=message.self_mask, salt=message.salt)
        case "mask_key":
            return MaskKeyShare(dealer=dealer, share=message.mask_key, salt=message.salt)
        case _:
            raise MalformedMessage(f"reveal shows no share of silo {dealer!r}: one of two is asked for")


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
            (_silo(item.silo), successions_from_wire(item.successions))
            for item in message.identities
            if item.successions
        ),
    )


def _identities_from_wire(
    identities: Sequence[federation_pb2.SiloIdentity],
) -> tuple[tuple[SiloName, Ed25519PublicKey], ...]:
    _bounded("identity keys beside a roster", identities, MAX_COHORT)
    return tuple((_silo(item.silo), public_key_from_bytes(item.key)) for item in identities)


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
            f"silo {key.silo[:_MAX_NAME_CHARACTERS]!r} sends a message of silo {named}: only its own is taken"
        )


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


def event_to_bytes(event: silo_machine.Event) -> bytes:
    """One event of a silo's journal. That of an OpenAttempt holds its root: keep it as secret, and erase it as soon."""
    return _stored(_event_to_stored(event))


def _event_to_stored(event: silo_machine.Event) -> pb.SiloEvent:
    match event:
        case silo_machine.OpenAttempt():
            opening = pb.SiloOpening(
                attempt=attempt_to_wire(event.attempt),
                model_digest=event.model,
                tensors=event.tensors,
                root=bytes(event.root.buffer),
                seen=_seen_to_wire(event.seen),
            )
            return pb.SiloEvent(plan_digest=event.attempt.plan, opening=opening)
        case Roster():
            return pb.SiloEvent(plan_digest=event.attempt.plan, roster=roster_to_wire(event))
        case SharedKeys():
            return pb.SiloEvent(shared_keys=shared_keys_to_wire(event))
        case Delivery():
            return pb.SiloEvent(delivery=delivery_to_wire(event))
        case silo_machine.VectorMasked():
            return pb.SiloEvent(masked_vector=event.vector)
        case SurvivorSet():
            return pb.SiloEvent(survivors=survivor_set_to_wire(event))
        case UnmaskRequest():
            return pb.SiloEvent(unmask=unmask_request_to_wire(event))
        case silo_machine.AttemptEnded():
            return pb.SiloEvent(plan_digest=event.attempt.plan, ended=attempt_to_wire(event.attempt))


def event_from_bytes(data: bytes, federation: FederationName) -> silo_machine.Event:
    """The event that `event_to_bytes` was given, of a silo of `federation`; raises MalformedMessage for anything else."""
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
            return silo_machine.VectorMasked(message.masked_vector)
        case "survivors":
            return survivor_set_from_wire(message.survivors)
        case "unmask":
            return unmask_request_from_wire(message.unmask)
        case "ended":
            return silo_machine.AttemptEnded(
                attempt_from_wire(message.ended, federation=federation, plan=message.plan_digest)
            )
        case _:
            raise MalformedMessage("a stored SiloEvent holds no event that this version knows")


def _opening_from_stored(
    message: pb.SiloOpening, *, federation: FederationName, plan: bytes
) -> silo_machine.OpenAttempt:
    _bounded("tensors of an attempt", message.tensors, MAX_TENSORS)
    if any(not 1 <= elements <= MAX_ELEMENTS for elements in message.tensors):
        raise MalformedMessage(f"an attempt names a tensor whose elements are not 1 to {MAX_ELEMENTS}")
    check_bytes("attempt", ROOT_BYTES, root=message.root)
    return silo_machine.OpenAttempt(
        attempt=attempt_from_wire(message.attempt, federation=federation, plan=plan),
        model=message.model_digest,
        tensors=tuple(message.tensors),
        root=Secret(message.root),
        seen=_seen_from_wire(message.seen),
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
            seen=_seen_to_wire(memory.seen),
            acknowledged=_seen_to_wire(memory.acknowledged),
            dealt=_seen_to_wire(memory.dealt),
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
    _bounded("plans of a memory", message.plans, MAX_PLANS)
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
    _bounded("advertisements of a memory", message.announced, MAX_ANNOUNCED)
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
        _seen_from_wire(message.seen),
        _seen_from_wire(message.acknowledged),
        _seen_from_wire(message.dealt),
    )


def verdict_to_wire(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(silo=verdict.silo, evidence=verdict.evidence, chunks=verdict.chunks, signature=verdict.signature)


def verdict_from_wire(message: pb.Verdict) -> Verdict:
    """Raises MalformedMessage; checks no signature."""
    return Verdict(
        silo=SiloName(message.silo), evidence=message.evidence, chunks=message.chunks, signature=message.signature
    )


def coordinator_event_to_bytes(event: coordinator_machine.Event) -> bytes:
    """One event of the coordinator's journal; raises MalformedMessage for more silos than a delivery can be sent to."""
    return _stored(_coordinator_event_to_stored(event))


def _coordinator_event_to_stored(event: coordinator_machine.Event) -> pb.CoordinatorEvent:
    match event:
        case coordinator_machine.OpenAttempt():
            _bounded("those invited", event.invited, MAX_COHORT)
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
        case coordinator_machine.SiloDropped():
            return pb.CoordinatorEvent(dropped=pb.SiloDropped(silo=event.silo, detail=event.detail))
        case coordinator_machine.PhaseClosed():
            return pb.CoordinatorEvent(phase_closed=event.phase)


def coordinator_event_from_bytes(data: bytes, federation: FederationName) -> coordinator_machine.Event:
    """What `coordinator_event_to_bytes` was given, by a coordinator of `federation`; raises MalformedMessage otherwise."""
    message = _read(pb.CoordinatorEvent, data)
    plan = message.plan_digest
    match message.WhichOneof("event"):
        case "opening":
            return coordinator_machine.OpenAttempt(
                attempt=attempt_from_wire(message.opening.attempt, federation=federation, plan=plan),
                terms=_terms_from_stored(message.opening.terms, federation),
                invited=_silos_from_wire("those invited", message.opening.invited),
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
            silo = _silo(message.dropped.silo)
            check_names("dropped silo", silo)
            return coordinator_machine.SiloDropped(silo, message.dropped.detail)
        case "phase_closed":
            if message.phase_closed not in _PHASES:
                raise MalformedMessage(f"secure aggregation has no phase {message.phase_closed[:80]!r}")
            return coordinator_machine.PhaseClosed(message.phase_closed)
        case _:
            raise MalformedMessage("a stored CoordinatorEvent holds no event that this version knows")


def _terms_to_stored(terms: Terms) -> pb.Terms:
    return pb.Terms(
        model_digest=terms.model,
        ranges=_ranges_to_wire(terms.ranges),
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
        ranges=_ranges_from_wire(message.ranges),
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
