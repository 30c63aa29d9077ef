"""Every field of every message that a silo can send, what covers it under differential privacy, and a round that is
held against that.

A field that is not in the table fails, so nobody adds one without saying why it may leave. When a silo sends something,
and whether it sends anything at all, is not in the table: that is a stated limit (ops/docs/privacy.md).
"""

import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from prometheus_client import generate_latest

from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from silo_agent.edges.accounts.shared_budget import SharedBudget
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.told import BUDGET_SPENT, FAILED, TOLD_UNDER_PRIVACY
from silo_agent.settings import Settings
from silo_agent.training.model.model import bind, vector_blocks
from silo_agent.training.update.masked_vector import own_weight
from silo_wire.messages import DeclineReason, RoundKey, Train
from silo_wire.plans.plan import PlanBundle
from silo_wire.v1 import enrolment_pb2, federation_pb2
from tests.support.federation_peer import FEDERATION, SILO, FederationPeer
from tests.support.tiny_t5 import SCHEMA, bundle_of, random_model
from tests.unit.test_agent_service import NET, Silo

STEPS = 4


class Why(Enum):
    """Why a field may leave."""

    IDENTITY = "who the silo is, and which process of which version"
    PUBLIC = "follows from plan, order and round model: the same whatever the records are"
    RELEASED = "an entry of the ledger covers it, or it is made from what one covers"
    CRYPTOGRAPHY = "keys, shares, random numbers; signatures and digests of what else is in the table"
    CLOSED = "one of a few words that say nothing of a record"
    PROGRESS = "which step of the plan's steps it is"
    WITHHELD = "never sent under differential privacy"


COVERED: dict[str, Why] = {
    **dict.fromkeys(
        (
            *(
                "CallKey.federation",
                "CallKey.silo",
                "AttendRequest.wire_version",
                "AttendRequest.wire_minor",
                "AttendRequest.agent_version",
            ),
            *(
                "MaskedInput.silo",
                "MemberKeys.silo",
                "SeenKeys.silo",
                "Dealing.silo",
                "Complaint.silo",
                "Complaint.dealer",
            ),
            *("Verdict.silo", "Agreement.silo", "Reveal.silo", "RevealedShare.dealer", "SealedShare.peer"),
            *("EnrolRequest.federation", "EnrolRequest.silo", "EnrolRequest.agent_version", "EnrolRequest.csr_der"),
            "RenewalRequest.csr_der",
            *("ReleaseGroup.silos", "GroupsSignature.silo"),  # given back to a coordinator that had them
        ),
        Why.IDENTITY,
    ),
    **dict.fromkeys(
        (
            *("CallKey.plan_digest", "CallKey.round", "CallKey.attempt"),
            *("FetchModelRequest.model_digest", "FetchModelRequest.first_chunk", "TrainedReport.model_digest"),
            *("UpdateHeader.model_digest", "UpdateHeader.first_chunk", "MaskedHeader.first_chunk", "Chunk.index"),
            *("Manifest.layout_digest", "Manifest.total_bytes", "Manifest.chunk_bytes"),
            *("TrainingSummary.examples", "TrainingSummary.optimizer_steps", "TrainingSummary.seconds"),
            *("TrainingSummary.loss_min", "TrainingSummary.loss_last", "MaskedInput.words"),
            *("Attempt.round", "Attempt.number", "Attempt.id", "LedgerHead.sequence"),
            *("EvidenceRequest.model_digest", "PiecesRequest.model_digest", "VerdictRequest.model_digest"),
            *("PiecesRequest.chunk", "Verdict.chunks", "VerdictRequest.known"),  # drawn, or dealt by names: not by data
            *(
                "PiecesRequest.without_vector",
                "PiecesRequest.without_master",
            ),  # whether files of the last round are there
            "GroupsRequest.after",  # the number of the release groups that it holds
            *(
                "ReleaseGroups.number",
                "ReleaseGroups.colluders",
                "ReleaseGroups.smallest_group",
            ),  # given back, as those
            "AuditHead.sequence",  # entries of orders, answers and people's commands, and seals by the clock
        ),
        Why.PUBLIC,
    ),
    **dict.fromkeys(
        (
            *("Chunk.data", "Manifest.chunk_digests", "UploadOffsetRequest.update_digest", "MaskedInput.vector"),
            *("TrainingSummary.loss_max", "TrainingSummary.loss_first"),  # the released weight over nominal_records
        ),
        Why.RELEASED,
    ),
    **dict.fromkeys(
        (
            *("AttendRequest.agent_instance", "UpdateHeader.signature", "LedgerHead.digest"),
            *("AuditHead.digest", "AuditHead.signature"),  # of entries that are salted
            *("MaskedInput.roster", "MaskedInput.dealings", "MaskedInput.signature"),
            *("MemberKeys.mask_key", "MemberKeys.box_key", "MemberKeys.signature", "SharedKeys.roster"),
            "SeenKeys.advertisement",
            *("Dealing.seed_commitment", "Dealing.signature", "DealtLine.self_mask", "DealtLine.mask_key"),
            *("SealedShare.ciphertext", "PairCopy.ciphertext", "PairCopy.covered", "PairCopy.commitment"),
            *("DealtLine.box", "SealedShare.box", "Complaint.roster", "Complaint.key", "Complaint.signature"),
            *("Agreement.roster", "Agreement.survivors", "Agreement.signature", "Reveal.roster", "Reveal.signature"),
            *("RevealedShare.self_mask", "RevealedShare.mask_key", "RevealedShare.salt"),
            *("EnrolRequest.token_secret", "EnrolRequest.identity_public_key", "EnrolRequest.identity_endorsement"),
            *("SignGroupsRequest.groups", "SignGroupsRequest.signature"),  # over what the coordinator has shown
            *("ReleaseGroups.previous", "GroupsSignature.signature"),  # that the coordinator has shown
            *("Verdict.evidence", "Verdict.signature"),  # over what the coordinator has shown
            "EnrolRequest.trust_bundle",  # of authorities that the coordinator has just told
            *("RenewalRequest.identity_endorsement", "SuccessionRequest.possession"),
            *("Succession.predecessor", "Succession.successor", "Succession.statement"),
        ),
        Why.CRYPTOGRAPHY,
    ),
    **dict.fromkeys(
        ("ReadinessRequest.ready", "ReadinessRequest.reason", "DeclineRequest.reason", "DeclineRequest.detail"),
        Why.CLOSED,
    ),
    **dict.fromkeys(("ProgressReport.phase", "ProgressReport.fraction"), Why.PROGRESS),
    **dict.fromkeys(
        (
            *("EvaluationReport.model_digest", "EvaluationReport.split", "EvaluationReport.examples"),
            *("EvaluationReport.exact_matches", "EvaluationReport.executed", "EvaluationReport.execution_matches"),
            *("EvaluationReport.loss_per_token", "EvaluationReport.seconds"),
        ),
        Why.WITHHELD,
    ),
}


def fields_of(message: Descriptor, seen: set[str]) -> Iterator[str]:
    """Every field below `message` that holds a value, as Message.field."""
    if message.full_name in seen:
        return
    seen.add(message.full_name)
    for field in message.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            yield from fields_of(field.message_type, seen)
        else:
            yield f"{message.name}.{field.name}"


def test_every_field_that_a_silo_can_send_is_in_the_table_with_its_reason() -> None:
    seen: set[str] = set()
    sent = {
        name
        for module in (federation_pb2, enrolment_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        for name in fields_of(method.input_type, seen)
    }
    assert sent == set(COVERED)


# ---- a round that is played -----------------------------------------------------------------------------------------


def values_of(message: Message) -> Iterator[tuple[str, Any]]:
    """Every value in `message`, also one that a field has because nothing was set, as (Message.field, value)."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        one = isinstance(value, Message | str | bytes | bool | int | float)
        if isinstance(value, Message) and not message.HasField(field.name):
            continue
        for item in [value] if one else value:
            if isinstance(item, Message):
                yield from values_of(item)
            else:
                yield f"{message.DESCRIPTOR.name}.{field.name}", item


class RecordingPeer(FederationPeer):
    """Keeps the values of every field of every message that comes in."""

    def __init__(self) -> None:
        super().__init__(NET)
        self.sent: defaultdict[str, set[Any]] = defaultdict(set)
        for method in federation_pb2.DESCRIPTOR.services_by_name["Federation"].methods:
            inner = getattr(self, method.name)
            setattr(self, method.name, self._streaming(inner) if method.server_streaming else self._single(inner))

    def _streaming(self, inner: Any) -> Any:
        async def call(request: Message, context: Any) -> AsyncIterator[Message]:
            self._keep(request)
            async for reply in inner(request, context):
                yield reply

        return call

    def _single(self, inner: Any) -> Any:
        async def call(request: Message | AsyncIterator[Message], context: Any) -> Any:
            if isinstance(request, Message):
                self._keep(request)
                return await inner(request, context)
            return await inner(self._kept(request), context)

        return call

    async def _kept(self, requests: AsyncIterator[Message]) -> AsyncIterator[Message]:
        async for request in requests:
            self._keep(request)
            yield request

    def _keep(self, request: Message) -> None:
        for name, value in values_of(request):
            self.sent[name].add(value)


def private_bundle() -> PlanBundle:
    return bundle_of(
        random_model(),
        schedule={"rounds": 1, "min_silos": 1},
        privacy={
            "level": "record",
            "target_epsilon": 8.0,
            "nominal_records": 8,
            "expected_batch_size": 8,
            "steps": STEPS,
            "noise_multiplier": 6.0,
            "loss_noise_multiplier": 12.0,
        },
        training={"epochs": 1, "batch_size": 4, "dropout": 0.0, "max_grad_norm": 1.0},
        evaluation={"initial": False, "every": 0, "last": False},
    )


BUNDLE = private_bundle()
SIX = [
    (f"how many people live in city {number} ?", f"SELECT CITY FROM PEOPLE WHERE NAME = '{number}' ;")
    for number in range(6)
]
ONE_MORE = ("zebra " * 40 + "?", "SELECT NAME , NAME , NAME FROM PEOPLE ;" * 3)


def data_folder(folder: Path, records: list[tuple[str, str]], *, broken: int = 0) -> Path:
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"id": f"q{number}", "question": question, "db_id": SCHEMA.db_id, "query": query})
        for number, (question, query) in enumerate(records)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines + ["{broken"] * broken) + "\n")
    (folder / "dev.jsonl").write_text(lines[0].replace('"q0"', '"d0"') + "\n")
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    return folder


async def played(
    folder: Path, records: list[tuple[str, str]], registry: Path | None = None, *, declines: bool = False
) -> tuple[RecordingPeer, Silo]:
    """One private round of a real trainer on these records, of a silo that counts in `registry`."""
    peer = RecordingPeer()
    async with peer:
        silo = Silo(folder / "silo", NET.credentials(peer.address))
        silo.sharing = sharing = SharedBudget(registry, silo.folder) if registry else None
        silo.rules = PolicyRules(max_epsilon=2.0)  # one round costs 1.52 by the filter, two 2.11
        silo.trainer = workshop(folder, records, sharing=sharing)  # type: ignore[assignment]
        blocks = vector_blocks(bind(random_model(), BUNDLE.layout))
        model = peer.offer(BUNDLE, b"".join(bytes(block) for block in blocks), chunk_bytes=1 << 16)
        key = RoundKey(federation=FEDERATION, plan=BUNDLE.plan.digest, round=1, attempt=1)
        async with silo.running():
            await peer.order(Train(key=key, model=model.digest, seconds_left=60.0))
            if declines:
                await peer.until(lambda: bool(peer.declined and peer.readiness))
                return peer, silo
            await silo.notes.outcomes(1)
            await peer.until(lambda: all(update.committed for update in peer.updates.values()))
        assert silo.outcomes() == [(1, "training", "uploaded")], silo.notes.of("work-failed")
    return peer, silo


def workshop(
    folder: Path, records: list[tuple[str, str]], *, broken: int = 0, sharing: SharedBudget | None = None
) -> Workshop:
    settings = Settings.model_validate(
        {"data": {"folder": str(data_folder(folder / "data", records, broken=broken))}, "training": {"device": "cpu"}}
    )
    sources = SiloSources(settings, scratch=folder / "scratch")
    policy = SiloPolicy(rules=settings.policy, silo=SILO)
    if sharing is None:
        return Workshop(settings=settings, policy=policy, sources=sources)
    return Workshop(settings=settings, policy=policy, sources=sources, on_private_data=sharing.register)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


async def test_with_one_record_more_all_but_what_the_ledger_covers_is_the_same(tmp_path: Path) -> None:
    (without, few), (more, many) = await played(tmp_path / "a", SIX), await played(tmp_path / "b", [*SIX, ONE_MORE])
    assert {name for name in without.sent if COVERED[name] is not Why.PROGRESS} == {
        name for name in more.sent if COVERED[name] is not Why.PROGRESS
    }
    for sent in (without.sent, more.sent):
        for name, values in sent.items():
            why = COVERED[name]
            assert why is not Why.WITHHELD, f"{name} = {values} left the silo"
            if why is Why.CLOSED:
                assert values <= {"", True, *TOLD_UNDER_PRIVACY}, name
        assert {fraction * STEPS for fraction in sent["ProgressReport.fraction"]} <= plan_relative(sent)
    for name in without.sent:
        if COVERED[name] in (Why.IDENTITY, Why.PUBLIC, Why.CLOSED):
            assert without.sent[name] == more.sent[name], f"{name} tells whether the record was there"
    ledgers = [PrivacyLedgerFile(silo.folder.privacy_ledger).entries() for silo in (few, many)]
    for entries in ledgers:
        assert [(entry.mechanism, entry.release) for entry in entries] == list(BUNDLE.plan.releases_of_round)
    assert without.sent["Chunk.data"].isdisjoint(more.sent["Chunk.data"])


def plan_relative(sent: dict[str, set[Any]]) -> set[float]:
    """Of training: whole steps. Of a transfer: whole chunks of what has the same size for all."""
    chunks = {len(digests) for digests in (sent["Chunk.index"],)}
    of_model = -(-BUNDLE.layout.total_bytes // (1 << 16))
    steps = {float(step) for step in range(STEPS + 1)}
    return steps | {STEPS * index / count for count in (*chunks, of_model) for index in range(count + 1)}


async def test_the_summary_is_the_released_weight_and_numbers_of_the_plan(tmp_path: Path) -> None:
    peer, _ = await played(tmp_path, SIX)
    (update,) = peer.updates.values()
    summary, privacy = update.header.summary, BUNDLE.plan.privacy
    section = BUNDLE.plan.aggregation.model_copy(update={"max_weight": privacy.weight_cap})
    weight = own_weight(section, summary)  # what a masked sum would count it by
    assert summary == privacy.summary(summary.loss_reduction * privacy.nominal_records)
    assert weight == pytest.approx(max(summary.loss_reduction * privacy.nominal_records, section.least_weight))
    assert weight <= privacy.weight_cap


async def test_of_a_registry_of_shared_records_nothing_leaves_and_a_budget_that_others_spent_is_a_budget_spent(
    tmp_path: Path,
) -> None:
    """The second folder has one record of the first's, written otherwise; the third has none."""
    registry = tmp_path / "registry"
    registry.mkdir(mode=0o700)
    alone, _ = await played(tmp_path / "alone", SIX)
    first, silo = await played(tmp_path / "a", SIX, registry)
    assert {name: values for name, values in first.sent.items() if COVERED[name] in (Why.PUBLIC, Why.CLOSED)} == {
        name: values for name, values in alone.sent.items() if COVERED[name] in (Why.PUBLIC, Why.CLOSED)
    }
    others = [(f"which city {number} ?", f"SELECT CITY FROM PEOPLE WHERE NAME = '{number}' ;") for number in range(5)]
    second, declined = await played(tmp_path / "b", [*others, (SIX[3][0].upper(), SIX[3][1])], registry, declines=True)
    assert (
        {reason for _, _, reason in second.readiness} == {detail for _, _, detail in second.declined} == {BUDGET_SPENT}
    )
    assert (
        "releases of other silo folders with some of the same records" in declined.notes.of("work-failed")[0]["detail"]
    )
    assert PrivacyLedgerFile(declined.folder.privacy_ledger).entries() == ()
    await played(tmp_path / "c", others, registry)
    digests = [path.read_bytes()[:16] for path in registry.glob("*.records")]
    assert len(digests) == 3
    for peer, one in ((first, silo), (second, declined)):
        told = [
            str(value).encode() if not isinstance(value, bytes) else value
            for values in peer.sent.values()
            for value in values
        ]
        metrics = generate_latest(one.metrics.registry)
        assert not any(
            digest in value or digest.hex().encode() in value for digest in digests for value in (*told, metrics)
        )


async def test_that_one_patient_has_half_of_the_lines_stays_in_the_silo(tmp_path: Path) -> None:
    """Its own log names the patient; the coordinator hears what it hears of any data that cannot be used."""
    values = BUNDLE.plan.model_dump(mode="json")
    values["privacy"]["unit_field"] = "patient"
    grouped = type(BUNDLE)(type(BUNDLE.plan).model_validate(values), BUNDLE.files)
    peer = RecordingPeer()
    async with peer:
        silo = Silo(tmp_path / "silo", NET.credentials(peer.address))
        silo.trainer = workshop(tmp_path, SIX)  # type: ignore[assignment]
        train = tmp_path / "data" / "train.jsonl"
        lines = [json.loads(line) for line in train.read_text().splitlines()]
        owners = ["bea", "ann", "ann", "cy", "ann", "dot"]
        train.write_text(
            "".join(json.dumps({**line, "patient": who}) + "\n" for line, who in zip(lines, owners, strict=True))
        )
        peer.bundles[grouped.plan.digest] = grouped
        key = RoundKey(federation=FEDERATION, plan=grouped.plan.digest, round=1, attempt=1)
        async with silo.running():
            await peer.order(Train(key=key, model=grouped.plan.model.initial, seconds_left=60.0))
            await peer.until(lambda: bool(peer.declined and peer.readiness))
    assert "patient 'ann' has 3 of 6 training lines" in silo.notes.of("work-failed")[0]["detail"]
    assert {detail for _, _, detail in peer.declined} == {reason for _, _, reason in peer.readiness} == {FAILED}
    assert peer.updates == {}
    assert PrivacyLedgerFile(silo.folder.privacy_ledger).entries() == ()
    assert not any("ann" in str(value) for values in peer.sent.values() for value in values if isinstance(value, str))


async def test_how_many_lines_are_broken_stays_in_the_silo(tmp_path: Path) -> None:
    sent = []
    for broken in (3, 5):
        peer = RecordingPeer()
        async with peer:
            silo = Silo(tmp_path / f"{broken}" / "silo", NET.credentials(peer.address))
            silo.trainer = workshop(tmp_path / f"{broken}", SIX, broken=broken)  # type: ignore[assignment]
            peer.bundles[BUNDLE.plan.digest] = BUNDLE
            key = RoundKey(federation=FEDERATION, plan=BUNDLE.plan.digest, round=1, attempt=1)
            async with silo.running():
                await peer.order(Train(key=key, model=BUNDLE.plan.model.initial, seconds_left=60.0))
                await peer.until(lambda peer=peer: bool(peer.declined and peer.readiness))  # type: ignore[misc]
        assert re.search("train.jsonl", silo.notes.of("work-failed")[0]["detail"])
        sent.append((peer.declined, peer.readiness))
    assert sent[0] == sent[1]
    assert {reason for _, _, reason in sent[0][1]} <= set(TOLD_UNDER_PRIVACY)


async def test_attack_model_made_for_something_else_is_refused_by_name_before_it_is_trained(tmp_path: Path) -> None:
    peer = RecordingPeer()
    async with peer:
        silo = Silo(tmp_path / "silo", NET.credentials(peer.address))
        silo.trainer = workshop(tmp_path, SIX)  # type: ignore[assignment]
        vector = np.frombuffer(b"".join(vector_blocks(bind(random_model(), BUNDLE.layout))), dtype="<f4").copy()
        vector[7] = 2e5
        model = peer.offer(BUNDLE, vector.tobytes(), chunk_bytes=1 << 16)
        key = RoundKey(federation=FEDERATION, plan=BUNDLE.plan.digest, round=1, attempt=1)
        async with silo.running():
            await peer.order(Train(key=key, model=model.digest, seconds_left=60.0))
            await peer.until(lambda: bool(peer.declined))
    ((_, reason, why),) = peer.declined
    assert reason is DeclineReason.POLICY
    assert "200000 in size, [policy] max_model_value of this silo allows 100000" in why
    assert not peer.updates
