"""Secure aggregation on the wire and in journals: what goes in comes out, to the bit; nothing else comes out of
anything."""

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.attempt import MAX_NUMBER, Attempt
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.groups.release_groups import Partition, Promise, first_link
from lorica_security.secure_aggregation.keys.key_agreement import CIPHERTEXT_BYTES, PUBLIC_KEY_BYTES
from lorica_security.secure_aggregation.keys.pair_secret import PairCopy
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import PRIME, SHARE_BYTES
from lorica_security.secure_aggregation.keys.share_box import box_bytes
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    LARGEST_BOUND,
    MAX_ELEMENTS,
    SMALLEST_BOUND,
    FixedPoint,
    Ranges,
    TensorRange,
)
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
    SealedShare,
    SelfMaskShare,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
    check_signed,
    signed,
)
from lorica_security.secure_aggregation.parameters import Parameters, Terms, default_threshold
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import resumption as silo_resumption
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import PlanMemory, SiloMemory
from silo_wire.canonical import Digest, digest_of
from silo_wire.codecs import common_codec, masked_orders_codec, orders_codec, secure_codec
from silo_wire.codecs.groups_codec import groups_from_wire, groups_to_wire
from silo_wire.codecs.secure_codec import MAX_COHORT
from silo_wire.codecs.secure_journals_codec import (
    coordinator_event_from_bytes,
    coordinator_event_to_bytes,
    event_from_bytes,
    event_to_bytes,
    known_lineages,
    memory_from_bytes,
    memory_to_bytes,
)
from silo_wire.manifest import Manifest, manifest_of, masked_layout
from silo_wire.messages import Mask, MaskedHeader, RoundKey
from silo_wire.transport import MAX_MESSAGE_BYTES
from silo_wire.v1 import federation_pb2
from silo_wire.v1 import secure_aggregation_pb2 as pb
from tests.support.secagg_federation import (
    FEDERATION,
    MODEL,
    PLAN,
    Federation,
    attempt,
    entropy,
    identities,
    identity_key,
    opening,
    silo_names,
    terms,
)

KEY = RoundKey(federation=FEDERATION, plan=Digest(PLAN.hex()), round=1, attempt=2)
ONE, OTHER, THIRD = silo_names(3)


# --- what goes in comes out -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """One kind of message, both ways, and the protobuf message that it is."""

    kind: type[Message]
    to_wire: Callable[[Any], Any]
    from_wire: Callable[[Any], Any]

    def through_bytes(self, value: Any) -> Any:
        return self.from_wire(self.kind.FromString(self.to_wire(value).SerializeToString()))


def _bound(parse: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda message: parse(message, federation=FEDERATION, plan=PLAN)


FORMS: dict[type, Form] = {
    Attempt: Form(pb.Attempt, secure_codec.attempt_to_wire, _bound(secure_codec.attempt_from_wire)),
    Parameters: Form(pb.Parameters, secure_codec.parameters_to_wire, secure_codec.parameters_from_wire),
    Advertisement: Form(
        pb.Advertisement, secure_codec.advertisement_to_wire, _bound(secure_codec.advertisement_from_wire)
    ),
    Roster: Form(pb.Roster, secure_codec.roster_to_wire, _bound(secure_codec.roster_from_wire)),
    SharedKeys: Form(pb.SharedKeys, secure_codec.shared_keys_to_wire, secure_codec.shared_keys_from_wire),
    Delivery: Form(pb.Delivery, secure_codec.delivery_to_wire, secure_codec.delivery_from_wire),
    Complaint: Form(pb.Complaint, secure_codec.complaint_to_wire, secure_codec.complaint_from_wire),
    MaskedInput: Form(pb.MaskedInput, secure_codec.masked_input_to_wire, secure_codec.masked_input_from_wire),
    SurvivorSet: Form(pb.SurvivorSet, secure_codec.survivor_set_to_wire, secure_codec.survivor_set_from_wire),
    Agreement: Form(pb.Agreement, secure_codec.agreement_to_wire, secure_codec.agreement_from_wire),
    UnmaskRequest: Form(pb.UnmaskRequest, secure_codec.unmask_request_to_wire, secure_codec.unmask_request_from_wire),
    Reveal: Form(pb.Reveal, secure_codec.reveal_to_wire, secure_codec.reveal_from_wire),
}
SIGNED = (Advertisement, Complaint, MaskedInput, Agreement, Reveal)
DIGESTED = (Attempt, Roster, SurvivorSet)

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True).map(SiloName)
digests = st.binary(min_size=32, max_size=32)
signatures = st.binary(min_size=64, max_size=64)
shares = st.integers(0, PRIME - 1).map(lambda value: value.to_bytes(SHARE_BYTES, "big"))
public_keys = digests.map(lambda digest: digest * (PUBLIC_KEY_BYTES // 32))
ciphertexts = digests.map(lambda digest: digest * (CIPHERTEXT_BYTES // 32))
copies = st.builds(PairCopy, ciphertext=ciphertexts, covered=digests, commitment=digests)
bounds = st.floats(SMALLEST_BOUND, LARGEST_BOUND)
tensor_ranges = st.builds(TensorRange, st.integers(1, MAX_ELEMENTS), bounds)
any_ranges = st.builds(Ranges, weight_cap=bounds, tensors=st.lists(tensor_ranges, min_size=1, max_size=6).map(tuple))
any_attempts = st.builds(
    Attempt,
    federation=st.just(FEDERATION),
    plan=st.just(PLAN),
    round=st.integers(1, MAX_NUMBER - 1),
    number=st.integers(1, MAX_NUMBER - 1),
    id=digests,
)
members = st.lists(names, min_size=1, max_size=6, unique=True).map(lambda it: tuple(sorted(it)))


@st.composite
def any_parameters(draw: st.DrawFn, cohort: int | None = None) -> Parameters:
    n = draw(st.integers(3, 40)) if cohort is None else cohort
    safe = FixedPoint.of(cohort=n, ranges=draw(any_ranges))
    fixed_point = replace(
        safe,
        levels=draw(st.integers(1 << 16, safe.levels)),
        saturation_limit=draw(st.integers(1, safe.saturation_limit)),
    )
    survivors = draw(st.integers(3, n))
    return Parameters(
        cohort=n,
        threshold=draw(st.integers(default_threshold(n), n)),
        colluders=draw(st.integers(0, 1 if n > 3 else 0)),
        min_survivors=survivors,
        least_sum=draw(st.integers(survivors, n)),
        fixed_point=fixed_point,
    )


@st.composite
def any_rosters(draw: st.DrawFn, at: Attempt | None = None, model: bytes | None = None) -> Roster:
    of = at or draw(any_attempts)
    silos = sorted(draw(st.lists(names, min_size=3, max_size=5, unique=True)))
    keys = iter(draw(st.lists(public_keys, min_size=2 * len(silos), max_size=2 * len(silos), unique=True)))
    return Roster(
        attempt=of,
        model=model or draw(digests),
        link=draw(digests),
        parameters=draw(any_parameters(len(silos))),
        members=tuple(
            Advertisement(attempt=of, silo=name, mask_key=next(keys), box_key=next(keys), signature=draw(signatures))
            for name in silos
        ),
    )


def any_dealings(roster: bytes, dealer: SiloName) -> st.SearchStrategy[Dealing]:
    lines = st.builds(DealtLine, self_mask=digests, mask_key=digests, box=digests)
    return st.builds(
        Dealing,
        roster=st.just(roster),
        silo=st.just(dealer),
        seed_commitment=digests,
        lines=st.lists(lines, max_size=4).map(tuple),
        signature=signatures,
    )


@st.composite
def sealed_shares(draw: st.DrawFn, dealer: SiloName, holder: SiloName) -> SealedShare:
    size = box_bytes(dealer, holder)
    return SealedShare(
        dealer=dealer,
        holder=holder,
        ciphertext=draw(ciphertexts),
        box=draw(st.binary(min_size=size, max_size=size)),
        copy=draw(copies) if dealer < holder else None,
    )


@st.composite
def any_shared_keys(draw: st.DrawFn) -> SharedKeys:
    dealer = draw(names)
    return SharedKeys(
        dealing=draw(any_dealings(draw(digests), dealer)),
        boxes=tuple(draw(sealed_shares(dealer, name)) for name in draw(members)),
    )


@st.composite
def any_deliveries(draw: st.DrawFn) -> Delivery:
    roster, holder = draw(digests), draw(names)
    return Delivery(
        roster=roster,
        holder=holder,
        dealings=tuple(draw(any_dealings(roster, name)) for name in draw(members)),
        boxes=tuple(draw(sealed_shares(name, holder)) for name in draw(members)),
    )


def any_agreements(name: SiloName) -> st.SearchStrategy[Agreement]:
    return st.builds(Agreement, roster=digests, silo=st.just(name), survivors=digests, signature=signatures)


@st.composite
def any_unmask_requests(draw: st.DrawFn) -> UnmaskRequest:
    return UnmaskRequest(roster=draw(digests), agreements=tuple(draw(any_agreements(name)) for name in draw(members)))


@st.composite
def any_reveals(draw: st.DrawFn) -> Reveal:
    kinds: st.SearchStrategy[type[SelfMaskShare] | type[MaskKeyShare]] = st.sampled_from([SelfMaskShare, MaskKeyShare])
    return Reveal(
        roster=draw(digests),
        silo=draw(names),
        shares=tuple(draw(kinds)(dealer=name, share=draw(shares), salt=draw(digests)) for name in draw(members)),
        signature=draw(signatures),
    )


VALUES: dict[type, st.SearchStrategy[Any]] = {
    Attempt: any_attempts,
    Parameters: any_parameters(),
    Advertisement: st.builds(
        Advertisement, attempt=any_attempts, silo=names, mask_key=public_keys, box_key=public_keys, signature=signatures
    ),
    Roster: any_rosters(),
    SharedKeys: any_shared_keys(),
    Delivery: any_deliveries(),
    Complaint: st.builds(Complaint, roster=digests, silo=names, dealer=names, key=digests, signature=signatures),
    MaskedInput: st.builds(
        MaskedInput,
        roster=digests,
        dealings=digests,
        silo=names,
        words=st.integers(1, (1 << 62) - 1),
        vector=digests,
        signature=signatures,
    ),
    SurvivorSet: members.flatmap(
        lambda silos: st.builds(
            SurvivorSet,
            roster=digests,
            dealings=digests,
            silos=st.just(silos),
            inputs=st.lists(digests, min_size=len(silos), max_size=len(silos)).map(tuple),
        )
    ),
    Agreement: names.flatmap(any_agreements),
    UnmaskRequest: any_unmask_requests(),
    Reveal: any_reveals(),
}
modest = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def assert_same(before: Any, after: Any) -> None:
    """Equal, and all that is signed or hashed of it too."""
    assert after == before
    assert type(after) is type(before)
    for name in ("statement", "digest", "dealings_digest"):
        assert getattr(after, name, None) == getattr(before, name, None)


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
@modest
@given(data=st.data())
def test_every_message_round_trips(kind: type, data: st.DataObject) -> None:
    value = data.draw(VALUES[kind])
    assert_same(value, FORMS[kind].through_bytes(value))


@given(any_parameters())
def test_doubles_travel_bit_for_bit(parameters: Parameters) -> None:
    after = FORMS[Parameters].through_bytes(parameters).fixed_point.ranges
    before = parameters.fixed_point.ranges
    for one, other in zip((before.weight_cap, *before.tensors), (after.weight_cap, *after.tensors), strict=True):
        one, other = (it.bound if isinstance(it, TensorRange) else it for it in (one, other))
        assert struct.pack(">d", one) == struct.pack(">d", other)


# --- real runs --------------------------------------------------------------------------------------------------------


class Wired(Federation):
    """A federation whose every message crosses the wire as bytes: orders and answers whole, as they are sent."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.carried: list[Any] = []
        self.alter = self._carried

    def _carried(self, to: str, message: Any) -> Any:
        if to:
            order = Mask(key=KEY, model=Digest(MODEL.hex()), seconds_left=9.5, attempt=self.attempt, message=message)
            raw = orders_codec.order_to_wire(order, SiloName(to)).SerializeToString()
            read = orders_codec.order_from_wire(federation_pb2.Notice.FromString(raw))
            assert read == order
            assert isinstance(read, Mask)
            after: Any = read.message
        elif isinstance(message, MaskedInput):  # before its vector, in a header: see below
            after = FORMS[MaskedInput].through_bytes(message)
        else:
            raw = masked_orders_codec.mask_answer_to_wire(KEY, message.silo, message).SerializeToString()
            after = masked_orders_codec.mask_answer_from_wire(federation_pb2.MaskAnswer.FromString(raw))
        assert_same(message, after)
        self.carried.append(after)
        return after


@cache
def run() -> Wired:
    """Seven silos, of which one deals and then drops: reveals hold shares of both kinds."""
    federation = Wired(7)
    federation.run(drops={federation.names[2]: "masked input"})
    return federation


@cache
def messages() -> dict[type, Any]:
    """One message of each kind, of the run; and of the complaint that none of it gave rise to."""
    found: dict[type, Any] = {type(message): message for message in run().carried}
    complaint = Complaint(roster=found[Roster].digest, silo=ONE, dealer=OTHER, key=entropy("box key"))
    return found | {
        Attempt: run().attempt,
        Parameters: found[Roster].parameters,
        Complaint: signed(complaint, identity_key(ONE)),
    }


def test_an_attempt_whose_messages_all_cross_the_wire_gives_the_exact_sum() -> None:
    federation = run()
    assert np.array_equal(federation.sum(), federation.true_sum())
    assert federation.unmask is not None
    assert federation.unmask.dropped == (federation.names[2],)
    assert {type(share) for share in messages()[Reveal].shares} == {SelfMaskShare, MaskKeyShare}
    assert set(messages()) == set(FORMS)


@pytest.mark.parametrize("kind", SIGNED, ids=lambda kind: kind.__name__)
def test_signatures_hold_after_the_wire(kind: type) -> None:
    pinned = identities(run().names)
    after = FORMS[kind].through_bytes(messages()[kind])
    check_signed(after, pinned)
    for dealing in FORMS[Delivery].through_bytes(messages()[Delivery]).dealings:
        check_signed(dealing, pinned)


@pytest.mark.parametrize("kind", DIGESTED, ids=lambda kind: kind.__name__)
def test_digests_are_those_of_before_the_wire(kind: type) -> None:
    before = messages()[kind]
    assert FORMS[kind].through_bytes(before).digest == before.digest


def test_the_order_to_advertise_keys_round_trips() -> None:
    order = Mask(key=KEY, model=Digest(MODEL.hex()), seconds_left=0.0, attempt=attempt(number=3))
    notice = federation_pb2.Notice.FromString(orders_codec.order_to_wire(order, ONE).SerializeToString())
    assert orders_codec.order_from_wire(notice) == order
    assert notice.mask.WhichOneof("step") == "advertise"


def masked_header(words: int = 23, first_chunk: int = 1) -> MaskedHeader:
    manifest = manifest_of(masked_layout(words), [bytes(range(words)) * 4], 32)
    masked = MaskedInput(
        roster=entropy("roster"),
        dealings=entropy("dealings"),
        silo=ONE,
        words=words,
        vector=bytes.fromhex(manifest.digest),
    )
    return MaskedHeader(key=KEY, masked=signed(masked, identity_key(ONE)), manifest=manifest, first_chunk=first_chunk)


@given(st.integers(1, 200), st.integers(0, 2**32 - 1))
def test_masked_headers_round_trip(words: int, first_chunk: int) -> None:
    header = masked_header(words, first_chunk)
    raw = masked_orders_codec.masked_header_to_wire(header, ONE).SerializeToString()
    after = masked_orders_codec.masked_header_from_wire(federation_pb2.MaskedHeader.FromString(raw))
    assert after == header
    check_signed(after.masked, identities([ONE]))


# --- orders, answers and headers that contradict themselves -----------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"key": replace(KEY, round=2)},
        {"key": replace(KEY, plan=Digest("33" * 32))},
        {"key": replace(KEY, federation="south")},
    ],
)
def test_an_order_for_another_round_plan_or_federation_than_its_attempt_cannot_be_made(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage, match="another round or plan"):
        Mask(**{"key": KEY, "model": Digest(MODEL.hex()), "seconds_left": 1.0, "attempt": attempt(), **changes})


def notice_of(message: Any) -> federation_pb2.Notice:
    order = Mask(key=KEY, model=Digest(MODEL.hex()), seconds_left=9.5, attempt=run().attempt, message=message)
    return orders_codec.order_to_wire(order, ONE)


def test_an_order_of_another_round_than_its_attempt_is_refused() -> None:
    notice = notice_of(messages()[Roster])
    notice.mask.key.round = 2
    with pytest.raises(MalformedMessage, match="round 2 is of another round"):
        orders_codec.order_from_wire(notice)


def test_the_identity_keys_beside_a_roster_arrive_and_a_bad_one_is_refused() -> None:
    keys = tuple(identities(silo_names(3)).items())
    order = orders_codec.order_from_wire(notice_of(messages()[Roster]))
    assert isinstance(order, Mask)
    notice = orders_codec.order_to_wire(replace(order, identities=keys), ONE)
    received = orders_codec.order_from_wire(notice)
    assert isinstance(received, Mask)
    assert received.identities == keys
    notice.mask.identities[1].key = bytes(32)
    with pytest.raises(MalformedMessage, match="small order"):
        orders_codec.order_from_wire(notice)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_a_masking_deadline_that_is_no_duration_is_refused(seconds: float) -> None:
    notice = notice_of(None)
    notice.mask.seconds_left = seconds
    with pytest.raises(MalformedMessage, match="seconds_left"):
        orders_codec.order_from_wire(notice)


def test_an_order_without_a_step_and_an_answer_without_a_message_are_refused() -> None:
    notice = notice_of(None)
    notice.mask.ClearField("step")
    with pytest.raises(MalformedMessage, match="no step"):
        orders_codec.order_from_wire(notice)
    with pytest.raises(MalformedMessage, match="no message"):
        masked_orders_codec.mask_answer_from_wire(federation_pb2.MaskAnswer(key=common_codec.round_call_key(KEY, ONE)))


@pytest.mark.parametrize("kind", [Advertisement, SharedKeys, Complaint, Agreement, Reveal], ids=lambda it: it.__name__)
def test_an_answer_of_another_silo_than_the_key_names_is_refused(kind: type) -> None:
    answer = messages()[kind]
    message = masked_orders_codec.mask_answer_to_wire(KEY, SiloName("mallory"), answer)
    with pytest.raises(MalformedMessage, match=f"'mallory' sends a message of silo {answer.silo}"):
        masked_orders_codec.mask_answer_from_wire(message)


def test_a_header_of_another_silo_is_refused() -> None:
    message = masked_orders_codec.masked_header_to_wire(masked_header(), OTHER)
    with pytest.raises(MalformedMessage, match=f"of silo {ONE}"):
        masked_orders_codec.masked_header_from_wire(message)


def test_a_header_whose_manifest_is_not_the_signed_one_is_refused() -> None:
    header = masked_header()
    other = manifest_of(masked_layout(23), [bytes(92)], 32)
    with pytest.raises(MalformedMessage, match="another manifest"):
        replace(header, manifest=other)
    longer = manifest_of(masked_layout(24), [bytes(96)], 32)
    with pytest.raises(MalformedMessage, match="another layout"):
        replace(header, manifest=longer)
    floats = Manifest(Digest("ab" * 32), 92, 32, header.manifest.chunk_digests)
    with pytest.raises(MalformedMessage, match="another layout"):
        replace(header, manifest=floats)


@pytest.mark.parametrize("words", [0, (1 << 38) + 1, (1 << 62) - 1, 1 << 62])
def test_a_header_of_a_vector_that_no_layout_has_is_refused(words: int) -> None:
    message = masked_orders_codec.masked_header_to_wire(masked_header(), ONE)
    message.masked_input.words = words
    with pytest.raises(MalformedMessage):
        masked_orders_codec.masked_header_from_wire(message)


# --- fields that are wrong --------------------------------------------------------------------------------------------


def places(message: Any) -> Iterator[tuple[Any, FieldDescriptor]]:
    """(message, field) of every field that is set, at any depth; of repeated messages the first and the last alone."""
    for field, value in message.ListFields():
        yield message, field
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in {0: value[0], 1: value[-1]}.values() if field.is_repeated else [value]:
                yield from places(inner)


def changed(kind: type, field_type: int, values: Callable[[Any], list[Any]]) -> Iterator[Message]:
    """The real message of `kind`, each time with one field of one type at one place given another value."""
    form, original = FORMS[kind], FORMS[kind].to_wire(messages()[kind])
    count = len(list(places(original)))
    for at in range(count):
        _, field = list(places(original))[at]
        if field.type != field_type:
            continue
        holder, _ = list(places(original))[at]
        old = getattr(holder, field.name)
        for value in values(old[0] if field.is_repeated else old):
            message = form.kind()
            message.CopyFrom(original)
            target, _ = list(places(message))[at]
            if field.is_repeated:
                getattr(target, field.name)[0] = value
            else:
                setattr(target, field.name, value)
            yield message


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind is not Parameters], ids=lambda kind: kind.__name__)
def test_every_field_of_bytes_has_one_length(kind: type) -> None:
    lengths = changed(kind, FieldDescriptor.TYPE_BYTES, lambda old: [b"", old[:-1], old + b"\0", old * 2])
    tried = 0
    for message in lengths:
        tried += 1
        with pytest.raises(MalformedMessage):
            FORMS[kind].from_wire(message)
    assert tried >= 4


@pytest.mark.parametrize(
    "kind", [kind for kind in FORMS if kind not in (Attempt, Parameters)], ids=lambda it: it.__name__
)
def test_every_name_is_a_silo_name(kind: type) -> None:
    bad = ["", "Silo", "silo\n", "../silo", "x" * 64, "x" * 100_000, "\N{LATIN SMALL LETTER A WITH RING ABOVE}"]
    tried = 0
    for message in changed(kind, FieldDescriptor.TYPE_STRING, lambda old: bad):
        tried += 1
        with pytest.raises(MalformedMessage) as refusal:
            FORMS[kind].from_wire(message)
        assert len(str(refusal.value)) < 300
    assert tried >= len(bad)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -0.0, -1.0, 5e-324, 1e300])
def test_bounds_that_are_no_range_are_refused(value: float) -> None:
    for message in changed(Parameters, FieldDescriptor.TYPE_DOUBLE, lambda old: [value]):
        with pytest.raises(MalformedMessage):
            FORMS[Parameters].from_wire(message)
    roster = secure_codec.roster_to_wire(messages()[Roster])
    roster.parameters.ranges.bounds[-1] = value
    with pytest.raises(MalformedMessage):
        FORMS[Roster].from_wire(roster)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cohort", 0),
        ("cohort", 8),
        ("threshold", 0),
        ("threshold", 8),
        ("colluders", 6),
        ("colluders", (1 << 32) - 1),
        ("min_survivors", 2),
        ("min_survivors", 8),
        ("levels", (1 << 16) - 1),
        ("levels", (1 << 31) - 1),
        ("saturation_limit", 0),
        ("saturation_limit", (1 << 32) - 1),
    ],
)
def test_parameters_that_do_not_hold_are_refused(field: str, value: int) -> None:
    message = secure_codec.parameters_to_wire(messages()[Parameters])
    setattr(message, field, value)
    with pytest.raises(MalformedMessage):
        secure_codec.parameters_from_wire(message)


def test_ranges_with_fewer_bounds_than_sizes_without_any_or_with_impossible_sizes_are_refused() -> None:
    for change in ("fewer bounds", "no tensor", "no elements", "too many elements"):
        message = secure_codec.parameters_to_wire(messages()[Parameters])
        match change:
            case "fewer bounds":
                del message.ranges.bounds[-1]
            case "no tensor":
                message.ranges.ClearField("elements")
                message.ranges.ClearField("bounds")
            case "no elements":
                message.ranges.elements[0] = 0
            case _:
                message.ranges.elements[0] = MAX_ELEMENTS + 1
        with pytest.raises(MalformedMessage):
            secure_codec.parameters_from_wire(message)


@pytest.mark.parametrize("field", ["round", "number"])
@pytest.mark.parametrize("value", [0, MAX_NUMBER, (1 << 64) - 1])
def test_attempts_are_counted_from_one(field: str, value: int) -> None:
    message = secure_codec.attempt_to_wire(attempt())
    setattr(message, field, value)
    with pytest.raises(MalformedMessage, match=field):
        secure_codec.attempt_from_wire(message, federation=FEDERATION, plan=PLAN)


@pytest.mark.parametrize(("federation", "plan"), [("", PLAN), ("North", PLAN), ("x" * 9999, PLAN), ("n", PLAN[:-1])])
def test_a_call_key_of_no_federation_or_plan_gives_no_attempt(federation: str, plan: bytes) -> None:
    with pytest.raises(MalformedMessage) as refusal:
        secure_codec.attempt_from_wire(secure_codec.attempt_to_wire(attempt()), federation=federation, plan=plan)
    assert len(str(refusal.value)) < 300


LISTS: dict[str, tuple[type, str]] = {
    "members": (Roster, "roster"),
    "dealings": (Delivery, "delivery"),
    "boxes of shared keys": (SharedKeys, "shared keys"),
    "boxes of a delivery": (Delivery, "delivery boxes"),
    "silos": (SurvivorSet, "survivor set"),
    "agreements": (UnmaskRequest, "unmask request"),
    "shares": (Reveal, "reveal"),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("how", ["twice", "unsorted"])
def test_lists_that_name_a_silo_twice_or_out_of_order_are_refused(name: str, how: str) -> None:
    kind, owner = LISTS[name]
    message = FORMS[kind].to_wire(messages()[kind])
    items = getattr(message, name.split()[0])
    values = list(items)
    values = [values[1], values[0], *values[2:]] if how == "unsorted" else [values[0], values[0], *values[2:]]
    del items[:]
    items.extend(values)
    with pytest.raises(MalformedMessage, match=f"{owner} names silos out of order or twice"):
        FORMS[kind].from_wire(message)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Roster, "members"),
        (SharedKeys, "boxes"),
        (SharedKeys, "dealing.lines"),
        (Delivery, "dealings"),
        (Delivery, "boxes"),
        (SurvivorSet, "silos"),
        (UnmaskRequest, "agreements"),
        (Reveal, "shares"),
    ],
)
def test_lists_longer_than_any_cohort_are_refused_before_they_are_read(kind: type, field: str) -> None:
    message = FORMS[kind].to_wire(messages()[kind])
    owner, _, leaf = field.rpartition(".")
    items = getattr(getattr(message, owner) if owner else message, leaf)
    last = items[-1]
    items.extend([last] * (MAX_COHORT + 1 - len(items)))
    with pytest.raises(MalformedMessage, match=f"are {MAX_COHORT + 1}: at most {MAX_COHORT} are allowed"):
        FORMS[kind].from_wire(message)


def test_ranges_of_more_tensors_than_a_model_has_are_refused() -> None:
    message = secure_codec.parameters_to_wire(messages()[Parameters])
    message.ranges.elements.extend([1] * 100_000)
    message.ranges.bounds.extend([1.0] * 100_000)
    with pytest.raises(MalformedMessage, match="tensor ranges are 100004"):
        secure_codec.parameters_from_wire(message)


def sealed(dealer: SiloName, holder: SiloName) -> SealedShare:
    copy = PairCopy(ciphertext=bytes(CIPHERTEXT_BYTES), covered=bytes(32), commitment=bytes(32))
    return SealedShare(
        dealer=dealer,
        holder=holder,
        ciphertext=bytes(CIPHERTEXT_BYTES),
        box=bytes(box_bytes(dealer, holder)),
        copy=copy if dealer < holder else None,
    )


def test_the_largest_cohort_s_messages_fit_into_one_message() -> None:
    """A delivery grows with the square of the cohort; the names here are as long as names can be."""
    silos = tuple(sorted(SiloName(f"{index:03}".ljust(63, "x")) for index in range(MAX_COHORT)))
    line = DealtLine(self_mask=bytes(32), mask_key=bytes(32), box=bytes(32))
    delivery = Delivery(
        roster=bytes(32),
        holder=silos[-1],  # with a copy from each of the others
        dealings=tuple(
            Dealing(roster=bytes(32), silo=name, seed_commitment=bytes(32), lines=(line,) * MAX_COHORT)
            for name in silos
        ),
        boxes=tuple(sealed(name, silos[-1]) for name in silos[:-1]),
    )
    raw = notice_of(delivery).SerializeToString()
    assert len(raw) < MAX_MESSAGE_BYTES
    order = orders_codec.order_from_wire(federation_pb2.Notice.FromString(raw))
    assert isinstance(order, Mask)
    assert order.message == delivery
    tensors = tuple(TensorRange(MAX_ELEMENTS, LARGEST_BOUND) for _ in range(100_000))
    wide = FixedPoint.of(cohort=7, ranges=Ranges(weight_cap=1.0, tensors=tensors))
    parameters = replace(messages()[Parameters], fixed_point=wide)
    assert len(secure_codec.parameters_to_wire(parameters).SerializeToString()) < MAX_MESSAGE_BYTES // 2


# --- one share per dealer ---------------------------------------------------------------------------------------------


def test_a_revealed_share_of_neither_kind_is_refused() -> None:
    message = secure_codec.reveal_to_wire(messages()[Reveal])
    message.shares[0].ClearField("share")
    with pytest.raises(MalformedMessage, match=f"no share of silo '{ONE}'"):
        secure_codec.reveal_from_wire(message)


@pytest.mark.parametrize("last", ["self_mask", "mask_key"])
def test_of_both_shares_of_a_dealer_only_the_last_is_read(last: str) -> None:
    """Bytes can hold both; what is read of them has one, and the signature, which is over the kind, tells."""
    real: Reveal = messages()[Reveal]
    both = {"self_mask": (1).to_bytes(SHARE_BYTES, "big"), "mask_key": (2).to_bytes(SHARE_BYTES, "big")}
    message = secure_codec.reveal_to_wire(real)
    entry = message.shares[0]
    first = "mask_key" if last == "self_mask" else "self_mask"
    entry.ClearField("share")
    cases = {name: pb.RevealedShare(**{name: both[name]}) for name in both}  # type: ignore[arg-type]
    raw = entry.SerializeToString() + cases[first].SerializeToString() + cases[last].SerializeToString()
    message.shares[0].ParseFromString(raw)
    after = secure_codec.reveal_from_wire(pb.Reveal.FromString(message.SerializeToString()))
    assert len(after.shares) == len(real.shares)
    assert type(after.shares[0]) is (SelfMaskShare if last == "self_mask" else MaskKeyShare)
    assert after.shares[0].share == both[last]
    assert both[first] not in message.SerializeToString()
    message.shares.insert(0, pb.RevealedShare(dealer=ONE, mask_key=both["mask_key"], salt=bytes(32)))
    with pytest.raises(MalformedMessage, match="twice"):
        secure_codec.reveal_from_wire(message)


def test_a_share_that_is_no_field_element_is_refused() -> None:
    message = secure_codec.reveal_to_wire(messages()[Reveal])
    for value in (PRIME, (1 << (8 * SHARE_BYTES)) - 1):
        message.shares[0].self_mask = value.to_bytes(SHARE_BYTES, "big")
        with pytest.raises(MalformedMessage, match="2\\^521"):
            secure_codec.reveal_from_wire(message)


# --- bytes that are wrong ---------------------------------------------------------------------------------------------


def parsed(kind: type, raw: bytes) -> Any:
    """What comes of `raw`, None where it is refused as it must be."""
    try:
        return FORMS[kind].from_wire(FORMS[kind].kind.FromString(raw))
    except (DecodeError, MalformedMessage):
        return None


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
def test_a_message_that_was_cut_off_is_refused_or_is_another_one(kind: type) -> None:
    value = messages()[kind]
    raw = FORMS[kind].to_wire(value).SerializeToString()
    step = max(1, len(raw) // 500)
    for length in [*range(0, len(raw), step), len(raw) - 1]:
        after = parsed(kind, raw[:length])
        assert after != value
        if kind in SIGNED:
            assert after is None


@pytest.mark.parametrize("kind", FORMS, ids=lambda kind: kind.__name__)
@given(raw=st.binary(max_size=300))
def test_random_bytes_are_refused(kind: type, raw: bytes) -> None:
    after = parsed(kind, raw)
    if after is not None:
        assert FORMS[kind].through_bytes(after) == after


# --- journals and memory ----------------------------------------------------------------------------------------------

any_openings = st.builds(
    silo_events.OpenAttempt,
    attempt=any_attempts,
    model=digests,
    tensors=st.lists(st.integers(1, MAX_ELEMENTS), max_size=6).map(tuple),
    root=digests.map(Secret),
)
any_events: st.SearchStrategy[silo_events.Event] = st.one_of(
    any_openings,
    any_rosters(),
    any_deliveries(),
    st.builds(silo_events.VectorMasked, digests),
    VALUES[SurvivorSet],
    any_unmask_requests(),
    st.builds(silo_events.AttemptEnded, any_attempts),
)
any_promises = st.integers(0, 10_000).flatmap(
    lambda colluders: st.builds(
        Promise, colluders=st.just(colluders), smallest_group=st.integers(max(3, colluders + 2), 10_002)
    )
)
any_links = st.builds(
    lambda silos, promise: first_link(
        FEDERATION, Partition.of([silos[:1], silos[1:]] if silos[1:] else [silos]), promise
    ),
    members,
    any_promises,
)
any_terms = st.builds(
    Terms,
    model=digests,
    ranges=any_ranges,
    link=any_links,
    min_cohort=st.integers(0, 2**32 - 1),
    min_survivors=st.integers(0, 2**32 - 1),
    colluders=st.integers(0, 2**32 - 1),
    threshold=st.none() | st.integers(0, 2**32 - 1),
)
any_coordinator_events: st.SearchStrategy[coordinator_events.Event] = st.one_of(
    st.builds(coordinator_events.OpenAttempt, attempt=any_attempts, terms=any_terms, invited=members),
    *(VALUES[kind] for kind in (Advertisement, SharedKeys, Complaint, MaskedInput, Agreement, Reveal)),
    st.builds(coordinator_events.SiloDropped, names, st.text(st.characters(exclude_categories=["Cs"]), max_size=40)),
    st.builds(coordinator_events.PhaseClosed, st.sampled_from([state.phase for state in coordinator_states.STATES])),
)
any_memories = st.lists(
    st.builds(
        PlanMemory,
        plan=digests,
        round=st.integers(1, MAX_NUMBER - 1),
        number=st.integers(1, MAX_NUMBER - 1),
        answered=st.booleans(),
    ),
    max_size=4,
    unique_by=lambda memory: memory.plan,
).map(lambda plans: SiloMemory(tuple(plans)))


@given(any_events)
def test_events_of_a_silo_round_trip(event: silo_events.Event) -> None:
    assert_same(event, event_from_bytes(event_to_bytes(event), FEDERATION))


@pytest.mark.parametrize(
    ("colluders", "smallest_group"), [(0, 0), (0, 2), (2, 3), (10_001, 10_002), (0, 10_003), (2**32 - 1, 2**32 - 1)]
)
def test_release_groups_that_promise_what_none_can_are_refused(colluders: int, smallest_group: int) -> None:
    message = groups_to_wire(first_link(FEDERATION, Partition.of([["silo-a", "silo-b", "silo-c"]])))
    assert groups_from_wire(message, FEDERATION).promise == Promise()
    message.colluders, message.smallest_group = colluders, smallest_group
    with pytest.raises(MalformedMessage, match="allowed are"):
        groups_from_wire(message, FEDERATION)


@given(any_coordinator_events)
def test_events_of_the_coordinator_round_trip(event: coordinator_events.Event) -> None:
    assert_same(event, coordinator_event_from_bytes(coordinator_event_to_bytes(event), FEDERATION))


@given(any_memories)
def test_memories_round_trip(memory: SiloMemory) -> None:
    assert memory_from_bytes(memory_to_bytes(memory)) == memory


@pytest.mark.parametrize("phase", ["share keys", "masked input", "consistency check", "unmasking", ""])
def test_both_sides_stand_where_they_stood_after_their_journals_were_bytes(phase: str) -> None:
    """In any phase, and once the sum is out: the very messages that were sent last are sent again."""
    federation = Federation(5).run(drops={ONE: "masked input"}, until=phase)
    events = [coordinator_event_to_bytes(event) for event in federation.journal]
    journal = tuple(coordinator_event_from_bytes(raw, FEDERATION) for raw in events)
    state, effects = coordinator_machine.restored(journal, federation.identities)
    assert state == federation.coordinator
    assert effects
    for each in federation.silos.values():
        if type(each.state) is silo_states.Resting:
            continue
        own = tuple(event_from_bytes(event_to_bytes(event), FEDERATION) for event in each.journal)
        memory = memory_from_bytes(memory_to_bytes(each.memory))
        restored, done = silo_resumption.restored(memory, own, each.party)
        assert restored == each.state
        assert [effect.message for effect in done if isinstance(effect, silo_effects.Send)] in ([each.sent[-1]], [])


def test_a_silo_s_root_comes_back_as_a_secret() -> None:
    event = opening(ONE, attempt())
    after = event_from_bytes(event_to_bytes(event), FEDERATION)
    assert isinstance(after, silo_events.OpenAttempt)
    assert isinstance(after.root, Secret)
    assert after.root == event.root
    assert after.root.buffer is not event.root.buffer
    assert entropy("root", ONE, attempt().id.hex()).hex() not in repr(after)


def stored() -> dict[str, tuple[bytes, Callable[[bytes], Any]]]:
    opened = coordinator_events.OpenAttempt(attempt=attempt(), terms=terms(threshold=3), invited=silo_names(3))
    memory = SiloMemory((PlanMemory(plan=PLAN, round=4, number=2, answered=True),))
    return {
        "silo": (event_to_bytes(opening(ONE, attempt())), lambda raw: event_from_bytes(raw, FEDERATION)),
        "roster": (event_to_bytes(messages()[Roster]), lambda raw: event_from_bytes(raw, FEDERATION)),
        "coordinator": (
            coordinator_event_to_bytes(opened),
            lambda raw: coordinator_event_from_bytes(raw, FEDERATION),
        ),
        "memory": (memory_to_bytes(memory), memory_from_bytes),
    }


@pytest.mark.parametrize("name", ["silo", "roster", "coordinator", "memory"])
@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_was_cut_off_or_damaged_on_disk_reads_as_nothing(name: str, data: st.DataObject) -> None:
    raw, read = stored()[name]
    read(raw)
    at = data.draw(st.integers(0, len(raw) - 1))
    flipped = bytearray(raw)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (raw[:at], bytes(flipped), raw + b"\0", raw[at + 1 :]):
        with pytest.raises(MalformedMessage, match="damaged or cut off"):
            read(damaged)


def restamped(message: Message) -> bytes:
    """As it is stored, with a digest that fits."""
    raw = message.SerializeToString()
    return bytes.fromhex(digest_of(raw)) + raw


def event_message(event: silo_events.Event) -> pb.SiloEvent:
    return pb.SiloEvent.FromString(event_to_bytes(event)[32:])


@pytest.mark.parametrize(
    "change",
    [
        {"root": b""},
        {"root": bytes(31)},
        {"model_digest": bytes(33)},
        {"tensors": [0]},
        {"tensors": [MAX_ELEMENTS + 1]},
        {"tensors": [1] * 100_001},
    ],
)
def test_a_stored_opening_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    message = event_message(opening(ONE, attempt()))
    for name, value in change.items():
        message.opening.ClearField(name)  # type: ignore[arg-type]
        message.opening.MergeFrom(pb.SiloOpening(**{name: value}))
    with pytest.raises(MalformedMessage):
        event_from_bytes(restamped(message), FEDERATION)


def test_what_is_stored_of_another_federation_or_without_an_event_is_refused_or_another() -> None:
    raw = event_to_bytes(opening(ONE, attempt()))
    after = event_from_bytes(raw, FederationName("south"))
    assert isinstance(after, silo_events.OpenAttempt)
    assert after.attempt != attempt()
    for message, read in (
        (pb.SiloEvent(), lambda raw: event_from_bytes(raw, FEDERATION)),
        (pb.SiloEvent(masked_vector=bytes(31)), lambda raw: event_from_bytes(raw, FEDERATION)),
        (pb.CoordinatorEvent(), lambda raw: coordinator_event_from_bytes(raw, FEDERATION)),
        (
            pb.CoordinatorEvent(phase_closed="lunch"),
            lambda raw: coordinator_event_from_bytes(raw, FEDERATION),
        ),
        (
            pb.CoordinatorEvent(dropped=pb.SiloDropped(silo="Nobody")),
            lambda raw: coordinator_event_from_bytes(raw, FEDERATION),
        ),
        (
            pb.CoordinatorEvent(opening=pb.CoordinatorOpening(invited=["a"] * (MAX_COHORT + 1))),
            lambda raw: coordinator_event_from_bytes(raw, FEDERATION),
        ),
    ):
        with pytest.raises(MalformedMessage):
            read(restamped(message))


def test_more_silos_than_can_be_served_are_not_invited() -> None:
    """Before anything is kept, so that no journal holds what cannot be read again."""
    most = coordinator_events.OpenAttempt(attempt=attempt(), terms=terms(), invited=silo_names(100) + hundred("x"))
    assert coordinator_event_from_bytes(coordinator_event_to_bytes(most), FEDERATION) == most
    with pytest.raises(MalformedMessage, match="those invited are 201: at most 200"):
        coordinator_event_to_bytes(replace(most, invited=(*most.invited, SiloName("z"))))


def hundred(prefix: str) -> tuple[SiloName, ...]:
    return tuple(SiloName(f"{prefix}{index:02}") for index in range(100))


@pytest.mark.parametrize(
    "plans",
    [
        [pb.PlanMemory(plan_digest=bytes(31), round=1, number=1)],
        [pb.PlanMemory(plan_digest=bytes(32), round=0, number=1)],
        [pb.PlanMemory(plan_digest=bytes(32), round=1, number=0)],
        [pb.PlanMemory(plan_digest=bytes(32), round=1 << 63, number=1)],
        [pb.PlanMemory(plan_digest=bytes(32), round=index, number=1) for index in (1, 2)],
    ],
)
def test_a_memory_that_no_silo_keeps_is_refused(plans: list[pb.PlanMemory]) -> None:
    with pytest.raises(MalformedMessage):
        memory_from_bytes(restamped(pb.SiloMemory(plans=plans)))


def test_an_empty_file_is_no_empty_memory() -> None:
    with pytest.raises(MalformedMessage, match="damaged"):
        memory_from_bytes(b"")
    assert memory_from_bytes(memory_to_bytes(SiloMemory())) == SiloMemory()
    assert known_lineages(memory_to_bytes(SiloMemory())) == 0
    assert known_lineages(memory_to_bytes(SiloMemory(), lineages=7)) == 7
    assert memory_from_bytes(memory_to_bytes(SiloMemory(), lineages=7)) == SiloMemory()
    with pytest.raises(MalformedMessage, match="changes of lineages"):
        known_lineages(restamped(pb.SiloMemory(lineages=1 << 62)))
