"""Secure aggregation's messages <-> protobuf, as `codec` does it for the others; and the journals of both sides as
bytes.

Where the wire leaves out federation and plan they are the caller's, from the call key. All that the protocol signs or
hashes comes out as it went in, doubles bit for bit. Whoever receives a silo's answer checks that the key beside it is
that of the connection; that the answer is of the key's silo is checked here.

`..._to_bytes` is for a disk: a digest, then the message, so that what was damaged or cut off reads as nothing at all.
Every fault is MalformedMessage. Counts are bounded before anything is made of them.
"""

from collections.abc import Sequence, Sized
from typing import TypeVar

from google.protobuf.message import Message

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import NAME_RULE, FederationName, SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.keys.pair_secret import PairCopy
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint, Ranges, TensorRange
from lorica_security.secure_aggregation.messages import (
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
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from lorica_security.secure_aggregation.parameters import Parameters
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.memory import Seen
from silo_wire.manifest import MAX_TENSORS
from silo_wire.v1 import secure_aggregation_pb2 as pb

MAX_COHORT = 200
"""A delivery grows with the square of the cohort: for 200 silos it has 4.3 MB, and transport.MAX_MESSAGE_BYTES is 5
MiB."""

MAX_NAME_CHARACTERS = 63

M = TypeVar("M", bound=Message)


def bounded(what: str, items: Sized, most: int) -> None:
    if len(items) > most:
        raise MalformedMessage(f"{what} are {len(items)}: at most {most} are allowed")


def checked_silo(text: str) -> SiloName:
    """A name that is short enough to be quoted; whether it is one the value that it goes into checks."""
    _name_of("silo", text)
    return SiloName(text)


def _name_of(what: str, text: str) -> None:
    if len(text) > MAX_NAME_CHARACTERS:
        raise MalformedMessage(f"{what} name has {len(text)} characters: use {NAME_RULE}")


# --- attempt, parameters ----------------------------------------------------------------------------------------------


def attempt_to_wire(attempt: Attempt) -> pb.Attempt:
    return pb.Attempt(round=attempt.round, number=attempt.number, id=attempt.id)


def attempt_from_wire(message: pb.Attempt, *, federation: str, plan: bytes) -> Attempt:
    _name_of("federation", federation)
    return Attempt(
        federation=FederationName(federation), plan=plan, round=message.round, number=message.number, id=message.id
    )


def ranges_to_wire(ranges: Ranges) -> pb.Ranges:
    return pb.Ranges(
        weight_cap=ranges.weight_cap,
        elements=[tensor.elements for tensor in ranges.tensors],
        bounds=[tensor.bound for tensor in ranges.tensors],
    )


def ranges_from_wire(message: pb.Ranges) -> Ranges:
    bounded("tensor ranges", message.elements, MAX_TENSORS)
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
        ranges=ranges_to_wire(parameters.fixed_point.ranges),
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
            ranges=ranges_from_wire(message.ranges),
        ),
    )


# --- 1. advertise keys ------------------------------------------------------------------------------------------------


def _keys_to_wire(advertisement: Advertisement) -> pb.MemberKeys:
    return pb.MemberKeys(
        silo=advertisement.silo,
        mask_key=advertisement.mask_key,
        box_key=advertisement.box_key,
        signature=advertisement.signature,
        seen=seen_to_wire(advertisement.seen),
    )


def _keys_from_wire(message: pb.MemberKeys, attempt: Attempt) -> Advertisement:
    return Advertisement(
        attempt=attempt,
        silo=checked_silo(message.silo),
        mask_key=message.mask_key,
        box_key=message.box_key,
        signature=message.signature,
        seen=seen_from_wire(message.seen),
    )


def seen_to_wire(seen: Seen) -> list[pb.SeenKeys]:
    return [pb.SeenKeys(silo=silo, advertisement=digest) for silo, digest in seen]


def seen_from_wire(message: Sequence[pb.SeenKeys]) -> Seen:
    bounded("silos whose keys were seen", message, MAX_COHORT)
    return tuple((checked_silo(item.silo), item.advertisement) for item in message)


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
    bounded("roster members", message.members, MAX_COHORT)
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
    bounded("lines of a dealing", message.lines, MAX_COHORT)
    return Dealing(
        roster=roster,
        silo=checked_silo(message.silo),
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
    bounded("boxes of shared keys", message.boxes, MAX_COHORT)
    dealing = _dealing_from_wire(message.dealing, message.roster)
    return SharedKeys(
        dealing=dealing,
        boxes=tuple(
            _sealed_share_from_wire(share, dealer=dealing.silo, holder=checked_silo(share.peer))
            for share in message.boxes
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
    bounded("dealings of a delivery", message.dealings, MAX_COHORT)
    bounded("boxes of a delivery", message.boxes, MAX_COHORT)
    holder = checked_silo(message.holder)
    check_names("delivery", holder)
    return Delivery(
        roster=message.roster,
        holder=holder,
        dealings=tuple(_dealing_from_wire(dealing, message.roster) for dealing in message.dealings),
        boxes=tuple(
            _sealed_share_from_wire(share, dealer=checked_silo(share.peer), holder=holder) for share in message.boxes
        ),
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
        silo=checked_silo(message.silo),
        dealer=checked_silo(message.dealer),
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
        silo=checked_silo(message.silo),
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
    bounded("masked inputs of survivors", message.inputs, MAX_COHORT)
    return SurvivorSet(
        roster=message.roster,
        dealings=message.dealings,
        silos=silos_from_wire("survivors", message.silos),
        inputs=tuple(message.inputs),
    )


def silos_from_wire(what: str, names: Sequence[str]) -> tuple[SiloName, ...]:
    bounded(what, names, MAX_COHORT)
    return tuple(checked_silo(name) for name in names)


def agreement_to_wire(agreement: Agreement) -> pb.Agreement:
    return pb.Agreement(
        roster=agreement.roster, silo=agreement.silo, survivors=agreement.survivors, signature=agreement.signature
    )


def agreement_from_wire(message: pb.Agreement) -> Agreement:
    return Agreement(
        roster=message.roster,
        silo=checked_silo(message.silo),
        survivors=message.survivors,
        signature=message.signature,
    )


# --- 5. unmasking -----------------------------------------------------------------------------------------------------


def unmask_request_to_wire(request: UnmaskRequest) -> pb.UnmaskRequest:
    return pb.UnmaskRequest(
        roster=request.roster, agreements=[agreement_to_wire(agreement) for agreement in request.agreements]
    )


def unmask_request_from_wire(message: pb.UnmaskRequest) -> UnmaskRequest:
    bounded("agreements of an unmask request", message.agreements, MAX_COHORT)
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
    bounded("shares of a reveal", message.shares, MAX_COHORT)
    return Reveal(
        roster=message.roster,
        silo=checked_silo(message.silo),
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
    dealer = checked_silo(message.dealer)
    match message.WhichOneof("share"):
        case "self_mask":
            return SelfMaskShare(dealer=dealer, share=message.self_mask, salt=message.salt)
        case "mask_key":
            return MaskKeyShare(dealer=dealer, share=message.mask_key, salt=message.salt)
        case _:
            raise MalformedMessage(f"reveal shows no share of silo {dealer!r}: one of two is asked for")


# --- verdicts ---------------------------------------------------------------------------------------------------------


def verdict_to_wire(verdict: Verdict) -> pb.Verdict:
    return pb.Verdict(silo=verdict.silo, evidence=verdict.evidence, chunks=verdict.chunks, signature=verdict.signature)


def verdict_from_wire(message: pb.Verdict) -> Verdict:
    """Raises MalformedMessage; checks no signature."""
    return Verdict(
        silo=SiloName(message.silo), evidence=message.evidence, chunks=message.chunks, signature=message.signature
    )
