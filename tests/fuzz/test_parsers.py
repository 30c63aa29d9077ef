"""Whatever bytes come, a parser returns a value that can be used or raises one of Lorica's own errors.

A fixed number of cases, the same in every run: derandomised and without a database of earlier ones. `FUZZ_CASES=100000
pytest tests/fuzz` looks further.
"""

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lorica_coordinator.settings import Settings, settings_text
from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.stored_vector import manifest_fields, manifest_from_fields, read_record, write_record
from lorica_security.audit.chain import NO_ENTRY, Head
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.audit.signed_head import SignedHead, heads_from_lines
from lorica_security.errors import IntegrityError, LoricaError, MalformedMessage
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.enrolment_token import PREFIX, decode, encode
from lorica_security.identity.identity_key import public_key_from_bytes, verify
from lorica_security.pki.authority import Authority
from lorica_security.pki.csr import certificate_request, check_request
from lorica_security.pki.parsing import parse_certificate, parse_certificates, parse_request
from lorica_security.pki.peer import identify_client
from lorica_security.pki.pins import spki_pin
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import TrustBundle
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Complaint,
    Delivery,
    MaskedInput,
    SurvivorSet,
    UnmaskRequest,
    check_signed,
)
from lorica_security.secure_aggregation.model_evidence.evidence import Evidence, ModelState, SignedEvidence, opened
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo.memory import PlanMemory, SiloMemory
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.codecs import (
    common_codec,
    evidence_codec,
    ledger_receipt,
    masked_orders_codec,
    orders_codec,
    secure_codec,
    secure_journals_codec,
    update_receipt,
    updates_codec,
)
from silo_wire.codecs.chunk_piece import ChunkPiece, chunk_piece, reader
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.manifest import Layout, Manifest, TensorSpec, manifest_of, masked_layout
from silo_wire.messages import (
    Evaluate,
    Evaluation,
    Finished,
    Mask,
    MaskAnswer,
    MaskedHeader,
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
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.statements import update_statement
from silo_wire.v1 import common_pb2, federation_pb2
from silo_wire.v1 import secure_aggregation_pb2 as pb
from tests.fuzz.mutations import spoilt_bytes, spoilt_json, spoilt_message
from tests.support import secagg_federation as secagg
from tests.support.federation_peer import small_bundle
from tests.support.tokens import mint

CASES = int(os.environ.get("FUZZ_CASES", "300"))
fuzz = settings(
    max_examples=CASES,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
MEMORY_BYTES = 64 << 20
T = TypeVar("T")

FEDERATION = FederationName("test-net")
SILO = SiloName("hospital-a")
IDENTITY = Identity(FEDERATION, Role.SILO, SILO)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LAYOUT = Layout("float32", (TensorSpec("a", (3, 5)), TensorSpec("b", (7,)), TensorSpec("c", ())))
DATA = bytes(range(LAYOUT.total_bytes))
MANIFEST = manifest_of(LAYOUT, [DATA], 32)
MODEL = Digest("cd" * 32)
KEY = RoundKey(federation=FEDERATION, plan=Digest("ab" * 32), round=3, attempt=1)
SUMMARY = TrainingSummary(
    examples=9, loss_max=3.0, loss_min=1.0, loss_first=3.0, loss_last=1.0, optimizer_steps=7, seconds=2.0
)
LOG = SignedHead(writer=IDENTITY.uri, head=Head(5, "ef" * 32), signature=b"s" * 64)
UPDATE = UpdateHeader(
    key=KEY, model=MODEL, manifest=MANIFEST, summary=SUMMARY, signature=b"s" * 64, first_chunk=1, log=LOG
)
UPDATE_RECEIPT = UpdateReceipt(
    key=KEY,
    silo=SILO,
    update=MODEL,
    total_bytes=7,
    shown=LOG.head,
    head=SignedHead(writer=Identity(FEDERATION, Role.COORDINATOR).uri, head=Head(9, "ab" * 32), signature=b"s" * 64),
    signature=b"s" * 64,
)
SCORE = Evaluation(
    split="dev", examples=9, exact_matches=3, executed=5, execution_matches=2, loss_per_token=1.0, seconds=0.5
)
ORDERS = (
    Standby(StandbyReason.GATHERING, "1 of 2"),
    Prepare(KEY.plan),
    Train(key=KEY, model=MODEL, seconds_left=60.0),
    Train(key=KEY, model=MODEL, seconds_left=60.0, included_update=MODEL),
    Evaluate(key=KEY, model=MODEL, seconds_left=60.0),
    Finished(plan=KEY.plan, rounds=3, final_model=MODEL, best_model=MODEL),
)


def secure_run() -> tuple[secagg.Federation, list[Any]]:
    """An attempt of four with one that deals and drops, and every message of it, in either direction."""
    federation, carried = secagg.Federation(4), []

    def carry(to: str, message: Any) -> Any:
        carried.append(message)
        return message

    federation.alter = carry
    federation.run(drops={federation.names[1]: "masked input"})
    return federation, carried


RUN, CARRIED = secure_run()
FIRST = RUN.names[0]
MASK_KEY = RoundKey(federation=secagg.FEDERATION, plan=Digest(secagg.PLAN.hex()), round=1, attempt=1)
MASK = Mask(key=MASK_KEY, model=Digest(secagg.MODEL.hex()), seconds_left=60.0, attempt=RUN.attempt)
REQUESTS = (None, *(it for it in CARRIED if isinstance(it, Roster | Delivery | SurvivorSet | UnmaskRequest)))
INPUTS = tuple(it for it in CARRIED if isinstance(it, MaskedInput))
ANSWERS = (
    *(it for it in CARRIED if it not in REQUESTS and it not in INPUTS),
    Complaint(roster=INPUTS[0].roster, silo=FIRST, dealer=RUN.names[1], key=bytes(32)),
)
MASKED_MANIFEST = manifest_of(masked_layout(15), [DATA[:60]], 32)
MASKED = MaskedHeader(
    key=MASK_KEY,
    masked=replace(INPUTS[0], words=15, vector=bytes.fromhex(MASKED_MANIFEST.digest)),
    manifest=MASKED_MANIFEST,
)
STATES = (
    ModelState(steps=1, model=RUN.terms.model, master=bytes(32), slots=(("momentum", bytes(32)),)),
    ModelState(steps=2, model=bytes(32), master=bytes(32), slots=(("momentum", bytes(32)),)),
)
EVIDENCE = SignedEvidence(
    evidence=Evidence(
        attempt=RUN.attempt,
        survivors=next(it for it in CARRIED if isinstance(it, SurvivorSet)),
        before=STATES[0],
        after=STATES[1],
        tail=(7, 0, 0, 0, 0, 0, 0),
        journal=tuple(RUN.journal),
    ),
    signature=bytes(64),
)
VERDICT = Verdict(silo=SILO, evidence=EVIDENCE.evidence.digest, chunks=b"\x05", signature=bytes(64))
MEMORY = SiloMemory(
    tuple(PlanMemory(plan=bytes([index]) * 32, round=index, number=1, answered=False) for index in (1, 2))
)


def refused(call: Callable[[], T]) -> T | None:
    """What `call` returns, None when it raises a LoricaError of one bounded line; anything else goes through."""
    told = ""
    try:
        return call()
    except LoricaError as error:
        told = str(error)
    assert told
    assert told.encode()  # it goes into logs and statuses
    return None


# --- messages ---------------------------------------------------------------------------------------------------------


def use_manifest(manifest: Manifest) -> None:
    assert len(manifest.digest) == 64
    assert sum(manifest.chunk_size(index) for index in range(manifest.chunks)) == manifest.total_bytes
    refused(lambda: manifest.check_layout(LAYOUT))
    refused(lambda: manifest.check_chunk(0, DATA[:32]))
    assert common_codec.manifest_from_wire(common_codec.manifest_to_wire(manifest)) == manifest


def use_update_header(header: UpdateHeader) -> None:
    use_manifest(header.manifest)
    statement = update_statement(
        key=header.key, silo=SILO, model=header.model, update=header.manifest.digest, summary=header.summary
    )
    refused(lambda: verify(IDENTITY_KEY, domain=b"client-update", payload=statement, signature=header.signature))
    silo = SILO if header.log is None else SiloName(Identity.from_uri(header.log.writer).name)  # that of the key
    assert updates_codec.update_header_from_wire(updates_codec.update_header_to_wire(header, silo)) == header


def stamped(message: Message) -> bytes:
    """As it lies on a disk, with a digest that fits: damage is told by the digest alone."""
    raw = message.SerializeToString()
    return bytes.fromhex(digest_of(raw)) + raw


def read_event(message: pb.SiloEvent) -> silo_events.Event:
    return secure_journals_codec.event_from_bytes(stamped(message), secagg.FEDERATION)


def read_coordinator_event(message: pb.CoordinatorEvent) -> coordinator_events.Event:
    return secure_journals_codec.coordinator_event_from_bytes(stamped(message), secagg.FEDERATION)


def use_order(order: Order) -> None:
    assert orders_codec.order_from_wire(orders_codec.order_to_wire(order, SILO)) == order


def use_answer(answer: MaskAnswer) -> None:
    key = MASK_KEY
    if isinstance(answer, Advertisement):
        key = replace(key, federation=answer.attempt.federation, plan=Digest(answer.attempt.plan.hex()))
    assert (
        masked_orders_codec.mask_answer_from_wire(masked_orders_codec.mask_answer_to_wire(key, answer.silo, answer))
        == answer
    )
    refused(lambda: check_signed(getattr(answer, "dealing", answer), RUN.identities))


def use_masked_header(header: MaskedHeader) -> None:
    use_manifest(header.manifest)
    refused(lambda: check_signed(header.masked, RUN.identities))
    message = masked_orders_codec.masked_header_to_wire(header, header.masked.silo)
    assert masked_orders_codec.masked_header_from_wire(message) == header


def use_event(event: silo_events.Event) -> None:
    assert (
        secure_journals_codec.event_from_bytes(secure_journals_codec.event_to_bytes(event), secagg.FEDERATION) == event
    )


def use_evidence(signed: SignedEvidence) -> None:
    assert evidence_codec.evidence_from_wire(evidence_codec.evidence_to_wire(signed), secagg.FEDERATION) == signed
    refused(lambda: signed.check(IDENTITY_KEY))
    if (sum_ := refused(lambda: opened(signed.evidence, RUN.identities, silo_party.Demands()))) is not None:
        assert sum_.roster.digest == signed.evidence.survivors.roster
        sum_.unmask.masks.erase()


def use_coordinator_event(event: coordinator_events.Event) -> None:
    raw = secure_journals_codec.coordinator_event_to_bytes(event)
    assert secure_journals_codec.coordinator_event_from_bytes(raw, secagg.FEDERATION) == event


def use_memory(memory: SiloMemory) -> None:
    assert secure_journals_codec.memory_from_bytes(secure_journals_codec.memory_to_bytes(memory)) == memory
    refused(lambda: memory.check_may_join(RUN.attempt))


IDENTITY_KEY: Ed25519PublicKey = public_key_from_bytes(
    bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
)

RECEIPT = LedgerReceipt(newest=Head(4, "ab" * 32), signature=b"s" * 64)

PARSERS: dict[str, tuple[tuple[Message, ...], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "call key": (
        (common_codec.round_call_key(KEY, SILO),),
        common_codec.round_key_from_wire,
        lambda key: canonical_json(key.plan),
    ),
    "manifest": ((common_codec.manifest_to_wire(MANIFEST),), common_codec.manifest_from_wire, use_manifest),
    "summary": (
        (updates_codec.summary_to_wire(SUMMARY),),
        updates_codec.summary_from_wire,
        lambda summary: summary.loss_reduction,
    ),
    "update header": (
        (updates_codec.update_header_to_wire(UPDATE, SILO),),
        updates_codec.update_header_from_wire,
        use_update_header,
    ),
    "model header": (
        (updates_codec.model_header_to_wire(ModelHeader(manifest=MANIFEST, round=2, signature=b"s" * 64)),),
        updates_codec.model_header_from_wire,
        lambda header: use_manifest(header.manifest),
    ),
    "evaluation": (
        (updates_codec.evaluation_to_wire(KEY, SILO, MODEL, SCORE),),
        updates_codec.evaluation_from_wire,
        lambda evaluation: evaluation.exact_matches / evaluation.examples,
    ),
    "order": (
        tuple(orders_codec.order_to_wire(order, SILO) for order in ORDERS),
        orders_codec.order_from_wire,
        use_order,
    ),
    "mask order": (
        tuple(orders_codec.order_to_wire(replace(MASK, message=request), FIRST) for request in REQUESTS),
        orders_codec.order_from_wire,
        use_order,
    ),
    "mask answer": (
        tuple(masked_orders_codec.mask_answer_to_wire(MASK_KEY, answer.silo, answer) for answer in ANSWERS),
        masked_orders_codec.mask_answer_from_wire,
        use_answer,
    ),
    "masked header": (
        (masked_orders_codec.masked_header_to_wire(MASKED, MASKED.masked.silo),),
        masked_orders_codec.masked_header_from_wire,
        use_masked_header,
    ),
    "silo event": (
        tuple(
            pb.SiloEvent.FromString(secure_journals_codec.event_to_bytes(event)[32:])
            for event in RUN.silos[FIRST].journal
        ),
        read_event,
        use_event,
    ),
    "coordinator event": (
        tuple(
            pb.CoordinatorEvent.FromString(secure_journals_codec.coordinator_event_to_bytes(event)[32:])
            for event in (*RUN.journal, coordinator_events.SiloDropped(FIRST, "declined"))
        ),
        read_coordinator_event,
        use_coordinator_event,
    ),
    "evidence": (
        (evidence_codec.evidence_to_wire(EVIDENCE),),
        lambda message: evidence_codec.evidence_from_wire(message, secagg.FEDERATION),
        use_evidence,
    ),
    "verdicts": (
        (pb.Verdicts(verdicts=[secure_codec.verdict_to_wire(VERDICT)] * 2),),
        lambda message: evidence_codec.verdicts_from_bytes(message.SerializeToString()),
        evidence_codec.verdicts_to_bytes,
    ),
    "silo memory": (
        (pb.SiloMemory.FromString(secure_journals_codec.memory_to_bytes(MEMORY)[32:]),),
        lambda message: secure_journals_codec.memory_from_bytes(stamped(message)),
        use_memory,
    ),
    "decline": (
        (federation_pb2.DeclineRequest(key=common_codec.round_call_key(KEY, SILO), reason=1, detail="policy"),),
        lambda message: (
            updates_codec.decline_reason_from_wire(message.reason),
            common_codec.detail_from_wire(message.detail),
        ),
        lambda parsed: common_codec.detail_to_wire(parsed[1]),
    ),
    "progress": (
        (federation_pb2.ProgressReport(key=common_codec.round_call_key(KEY, SILO), phase=2, fraction=0.5),),
        lambda message: updates_codec.phase_from_wire(message.phase),
        updates_codec.phase_to_wire,
    ),
    "update receipt": (
        (update_receipt.receipt_to_wire(UPDATE_RECEIPT),),
        lambda message: update_receipt.receipt_from_wire(message, key=KEY, silo=SILO),
        lambda receipt: UpdateReceipt.from_particulars(receipt.particulars(), federation=FEDERATION, silo=SILO),
    ),
    "ledger receipt": (
        (ledger_receipt.receipt_to_wire(RECEIPT),),
        ledger_receipt.receipt_from_wire,
        lambda receipt: LedgerReceipt.from_json(receipt.to_json(), "receipt"),
    ),
}


@pytest.mark.parametrize("name", PARSERS)
@fuzz
@given(data=st.data())
def test_messages_with_spoilt_fields(name: str, data: st.DataObject) -> None:
    valid, parse, use = PARSERS[name]
    message = data.draw(spoilt_message(st.sampled_from(valid)))
    parsed = refused(lambda: parse(message))
    if parsed is not None:
        use(parsed)


@pytest.mark.parametrize("name", PARSERS)
@fuzz
@given(data=st.data())
def test_messages_from_spoilt_bytes(name: str, data: st.DataObject) -> None:
    valid, parse, use = PARSERS[name]
    raw = data.draw(
        st.one_of(spoilt_bytes(st.sampled_from([item.SerializeToString() for item in valid])), st.binary(max_size=200))
    )
    try:
        message = type(valid[0]).FromString(raw)
    except DecodeError:  # which the gate and the client turn into MalformedMessage
        return
    parsed = refused(lambda: parse(message))
    if parsed is not None:
        use(parsed)


@pytest.mark.parametrize("name", PARSERS)
def test_the_valid_messages_are_taken(name: str) -> None:
    """Or the fuzzers would be spoiling what was spoilt already."""
    valid, parse, use = PARSERS[name]
    for message in valid:
        use(parse(message))


ENTRY = Entry(
    sequence=1,
    previous=NO_ENTRY,
    at=1_800_000_000,
    event=Event.UPDATE_LEAVES,
    who=IDENTITY.uri,
    details={"round": 3, "update": MODEL},
    salt="5a" * 16,
)


@fuzz
@given(
    raw=st.one_of(
        spoilt_bytes(st.just(ENTRY.line())),
        spoilt_json(json.loads(ENTRY.line()), canonical_json).map(lambda raw: raw + b"\n"),
        st.binary(max_size=200),
    )
)
def test_a_line_of_an_audit_log(raw: bytes) -> None:
    entry = refused(lambda: entry_from_line(raw, "line"))
    assert entry is None or entry.line() == raw


@fuzz
@given(
    raw=st.one_of(
        spoilt_bytes(st.just(LOG.line())),
        spoilt_json(json.loads(LOG.line()), canonical_json).map(lambda raw: raw + b"\n"),
        st.binary(max_size=200),
    )
)
def test_a_file_of_audit_heads(raw: bytes) -> None:
    heads = refused(lambda: heads_from_lines(raw, "heads"))
    assert heads is None or all(len(head.signature) == 64 for head in heads)


@fuzz
@given(
    raw=st.one_of(
        spoilt_bytes(st.just(RECEIPT.to_json())),
        spoilt_json(json.loads(RECEIPT.to_json()), canonical_json),
        st.binary(max_size=200),
    )
)
def test_a_receipt_file(raw: bytes) -> None:
    receipt = refused(lambda: LedgerReceipt.from_json(raw, "receipt"))
    assert receipt is None or receipt.to_json() == raw


@pytest.mark.parametrize("kind", [federation_pb2.UpdatePiece, federation_pb2.ModelPiece])
@fuzz
@given(data=st.data())
def test_pieces_are_read_as_protobuf_reads_them(kind: Any, data: st.DataObject) -> None:
    """The short way for chunks and protobuf's own agree on every input: on the value, or on there being none."""
    index, content = (
        data.draw(st.sampled_from([0, 1, 127, 128, 1 << 20, (1 << 32) - 1])),
        data.draw(st.binary(max_size=300)),
    )
    piece = chunk_piece(index, content)
    assert kind.FromString(piece) == kind(chunk=common_pb2.Chunk(index=index, data=content))
    other = kind()
    if kind is federation_pb2.UpdatePiece:
        header = data.draw(st.sampled_from(["header", "masked"]))
        getattr(other, header).first_chunk = 1
    raw = data.draw(
        st.one_of(
            spoilt_bytes(st.just(piece)),
            spoilt_bytes(st.just(other.SerializeToString() + piece)),
            st.just(piece + piece),
            st.binary(max_size=60),
        )
    )
    try:
        expected = kind.FromString(raw)
    except DecodeError:
        with pytest.raises(DecodeError):
            reader(kind)(raw)
        return
    read = reader(kind)(raw)
    if isinstance(read, ChunkPiece):
        assert expected.WhichOneof("piece") == "chunk"
        assert (read.index, bytes(read.data)) == (expected.chunk.index, expected.chunk.data)
    else:
        assert read == expected
        assert expected.WhichOneof("piece") != "chunk"


# --- JSON -------------------------------------------------------------------------------------------------------------

BUNDLE = small_bundle()
PLAN_VALUE = json.loads(BUNDLE.plan.to_json())
LAYOUT_VALUE = json.loads(LAYOUT.to_json())
NESTED = b"[" * 100_000


def use_layout(layout: Layout) -> None:
    assert len(layout.digest) == 64
    assert layout.total_bytes > 0
    assert Layout.from_json(layout.to_json()) == layout
    for tensor, position in layout.placed():
        assert 0 <= position <= position + tensor.elements <= layout.parameters


@fuzz
@given(raw=st.one_of(spoilt_json(LAYOUT_VALUE, canonical_json), spoilt_bytes(st.just(LAYOUT.to_json())), st.binary()))
@example(raw=NESTED)
@example(raw=b'{"dtype":"float32","tensors":[["a",[' + b"9" * 5000 + b"]]]}")
@example(raw=b'{"dtype":"float32","tensors":[["a",[' + b",".join([b"9" * 18] * 50_000) + b"]]]}")
@example(raw=b'{"dtype":"float32","tensors":[["\\ud800",[1]]]}')
def test_layouts(raw: bytes) -> None:
    layout = refused(lambda: Layout.from_json(raw))
    if layout is not None:
        use_layout(layout)


@fuzz
@given(
    raw=st.one_of(
        spoilt_json(PLAN_VALUE, canonical_json), spoilt_bytes(st.just(BUNDLE.plan.to_json())), st.binary(max_size=200)
    )
)
@example(raw=NESTED)
@example(raw=BUNDLE.plan.to_json().replace(b'"seed":0', b'"seed":NaN'))
@example(raw=BUNDLE.plan.to_json().replace(b'"beta1":0.9', b'"beta1":NaN'))
@example(raw=BUNDLE.plan.to_json().replace(b'"source":"size:test"', b'"source":"\\ud800"'))
def test_plans(raw: bytes) -> None:
    plan = refused(lambda: Plan.from_json(raw))
    if plan is not None:
        assert plan.to_json() == raw
        assert Plan.from_json(plan.to_json()).digest == plan.digest


@fuzz
@given(data=st.data())
def test_bundles(data: st.DataObject) -> None:
    """The digest that was asked for is that of the spoilt plan, so that the rest of the checks is reached."""
    plan = data.draw(st.one_of(st.just(BUNDLE.plan.to_json()), spoilt_json(PLAN_VALUE, canonical_json)))
    files = {
        name: data.draw(st.one_of(st.just(content), spoilt_bytes(st.just(content)), st.just(NESTED)))
        for name, content in BUNDLE.files.items()
    }
    message = federation_pb2.PlanBundle(plan_json=plan)
    for name, content in files.items():
        message.files.add(name=data.draw(st.sampled_from([name, name, name, "../x", "layout.json"])), content=content)
    raw = message.SerializeToString()
    raw = data.draw(st.one_of(st.just(raw), spoilt_bytes(st.just(raw))))
    bundle = refused(lambda: PlanBundle.decode(raw, digest_of(plan)))
    if bundle is not None:
        use_layout(bundle.layout)
        assert PlanBundle.decode(bundle.encode(), bundle.plan.digest) == bundle


@fuzz
@given(data=st.data())
def test_a_plan_s_files_that_fit_their_digests_and_are_wrong(data: st.DataObject) -> None:
    """A coordinator can name the digests of whatever it likes: no digest protects a silo from its contents."""
    files = {
        "config.json": data.draw(st.one_of(spoilt_json({"a": {"b": [1]}}, canonical_json), st.just(NESTED))),
        "layout.json": data.draw(spoilt_json(LAYOUT_VALUE, canonical_json)),
    }
    layout = refused(lambda: Layout.from_json(files["layout.json"]))
    value = json.loads(BUNDLE.plan.to_json())
    value["model"]["files"] = {name: digest_of(content) for name, content in files.items()}
    if layout is not None:
        value["model"] |= {"layout": layout.digest, "parameters": layout.parameters}
    plan = refused(lambda: Plan.from_json(canonical_json(value)))
    if plan is not None:
        message = federation_pb2.PlanBundle(plan_json=plan.to_json())
        for name, content in files.items():
            message.files.add(name=name, content=content)
        bundle = refused(lambda: PlanBundle.decode(message.SerializeToString(), plan.digest))
        if bundle is not None:
            use_layout(bundle.layout)


@fuzz
@given(
    raw=st.one_of(
        spoilt_json(json.loads(canonical_json(manifest_fields(MANIFEST))), canonical_json),
        spoilt_bytes(st.just(canonical_json(manifest_fields(MANIFEST)))),
    )
)
def test_stored_manifests(raw: bytes) -> None:
    try:
        value = json.loads(raw)
    except ValueError:
        return
    manifest = refused(lambda: manifest_from_fields(value, Path("a.json")))
    if manifest is not None:
        manifest.digest.encode()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@fuzz
@given(data=st.data())
def test_records_on_disk(scratch: Path, data: st.DataObject) -> None:
    path = scratch / "record.json"
    write_record(path, {"manifest": manifest_fields(MANIFEST), "norm": 1.0})
    valid = path.read_bytes()
    path.write_bytes(
        data.draw(
            st.one_of(spoilt_json(json.loads(valid), canonical_json), spoilt_bytes(st.just(valid)), st.just(NESTED))
        )
    )
    refused(lambda: read_record(path))


@pytest.mark.parametrize("fields", ['{"norm": NaN}', '{"norm": 1e999}', '{"a": "\\ud800"}', "[]", "null"])
def test_records_that_canonical_json_cannot_spell(scratch: Path, fields: str) -> None:
    path = scratch / "record.json"
    path.write_text(f'{{"digest": "{"ab" * 32}", "fields": {fields}}}')
    with pytest.raises(IntegrityError, match="was damaged"):
        read_record(path)


# --- model files ------------------------------------------------------------------------------------------------------

HEADER = model_file.header(LAYOUT)
ENTRIES = json.loads(HEADER[8:])


def spell_header(value: Any) -> bytes:
    text = canonical_json(value)
    return len(text).to_bytes(8, "little") + text + DATA


@fuzz
@given(data=st.data())
def test_safetensors_headers(scratch: Path, data: st.DataObject) -> None:
    """A file that is taken holds this layout's vector, byte for byte."""
    path = scratch / "model.safetensors"
    raw = data.draw(st.one_of(spoilt_json(ENTRIES, spell_header), spoilt_bytes(st.just(HEADER + DATA)), st.binary()))
    path.write_bytes(raw)
    offset = refused(lambda: model_file.check(path, LAYOUT))
    if offset is not None:
        assert len(raw) - offset == LAYOUT.total_bytes


def test_the_valid_safetensors_file_is_taken(scratch: Path) -> None:
    path = scratch / "valid.safetensors"
    path.write_bytes(HEADER + DATA)
    assert model_file.check(path, LAYOUT) == len(HEADER)


# --- tokens, certificates, settings -----------------------------------------------------------------------------------

AUTHORITY = Authority.create(FEDERATION, now=NOW)
TLS_KEY = new_tls_key()
REQUEST = certificate_request(TLS_KEY, IDENTITY)
CERTIFICATE = AUTHORITY.issue(TLS_KEY.public_key(), IDENTITY, now=NOW)
DER, PEM = CERTIFICATE.public_bytes(Encoding.DER), CERTIFICATE.public_bytes(Encoding.PEM)
TRUST = TrustBundle((AUTHORITY.certificate,))
TOKEN = encode(
    mint(
        federation=FEDERATION,
        silo=SILO,
        ca_pin=spki_pin(AUTHORITY.certificate),
        host="192.0.2.1",
        port=7444,
        now=NOW,
    )
)


@fuzz
@given(text=st.one_of(spoilt_bytes(st.just(TOKEN.encode())).map(lambda raw: raw.decode("latin-1")), st.text()))
@example(text=PREFIX)
@example(text=TOKEN)
def test_enrolment_tokens(text: str) -> None:
    token = refused(lambda: decode(text))
    if token is not None:
        # White space and quotation marks are all that may stand in it beside its own characters.
        assert encode(token) == "".join(one for one in text if one.isascii() and (one.isalnum() or one in "-_"))


@fuzz
@given(raw=st.one_of(spoilt_bytes(st.sampled_from([DER, PEM])), st.binary(max_size=300)))
def test_certificates(raw: bytes) -> None:
    """None but the certificate itself ever speaks for the silo."""
    refused(lambda: parse_certificate(raw))
    refused(lambda: parse_certificates(raw))
    identity = refused(lambda: identify_client(raw, trust=TRUST, now=NOW, federation=FEDERATION))
    if identity is not None:
        assert identity == IDENTITY
        assert parse_certificate(raw).tbs_certificate_bytes == CERTIFICATE.tbs_certificate_bytes


@fuzz
@given(raw=st.one_of(spoilt_bytes(st.just(REQUEST)), st.binary(max_size=300)))
def test_certificate_requests(raw: bytes) -> None:
    refused(lambda: parse_request(raw))
    key = refused(lambda: check_request(raw, IDENTITY))
    if key is not None:
        assert key.public_numbers() == TLS_KEY.public_key().public_numbers()


SETTINGS_TEXT = settings_text(FEDERATION, ["192.0.2.1"])


@fuzz
@given(text=spoilt_bytes(st.just(SETTINGS_TEXT.encode())).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_settings(text: str) -> None:
    refused(lambda: Settings.parse(text, "federation.toml"))


# --- what parsing costs -----------------------------------------------------------------------------------------------


MANY_MEMBERS = pb.Roster(members=[pb.MemberKeys()] * 500_000)
MANY_TENSORS = pb.Parameters(ranges=pb.Ranges(elements=[1] * 500_000, bounds=[1.0] * 500_000))


def _deep_config(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


@pytest.mark.parametrize(
    "parse",
    [
        lambda: Layout.from_json(NESTED),
        lambda: Layout.from_json(canonical_json({"dtype": "float32", "tensors": [["a", [1 << 40] * 100_000]]})),
        lambda: Plan.from_json(_deep_config(100_000)),
        lambda: common_codec.manifest_from_wire(
            common_pb2.Manifest(layout_digest=b"\0" * 32, total_bytes=1 << 40, chunk_bytes=1)
        ),
        lambda: common_codec.detail_from_wire("x" * (4 << 20)),
        lambda: secure_codec.roster_from_wire(MANY_MEMBERS, federation=secagg.FEDERATION, plan=secagg.PLAN),
        lambda: secure_codec.parameters_from_wire(MANY_TENSORS),
        lambda: parse_certificate(b"\x30\x84\xff\xff\xff\xff" + b"\0" * 1000),
        lambda: decode(PREFIX + "A" * (1 << 20)),
    ],
    ids=[
        "nested-layout",
        "endless-shape",
        "nested-plan",
        "tebibyte-manifest",
        "novel",
        "many-members",
        "many-tensors",
        "long-der",
        "long-token",
    ],
)
def test_small_inputs_that_promise_much_cost_little(parse: Callable[[], object]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((MalformedMessage, LoricaError)):
            parse()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_BYTES
