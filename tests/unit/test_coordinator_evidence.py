"""What the coordinator's own files say of its rounds: every chunk that it wrote is the one that a silo makes again."""

import asyncio
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_coordinator.service.ports import KeptRound
from lorica_coordinator.service.round_checks import RoundChecks
from lorica_security.errors import AuthorisationError, IntegrityError, MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Workspace
from lorica_security.secure_aggregation.model_evidence.evidence import (
    Evidence,
    Lineage,
    SignedEvidence,
    opened,
    signed_evidence,
)
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict, signed_verdict
from lorica_security.secure_aggregation.silo.party import Demands
from silo_wire.canonical import Digest
from silo_wire.checkable_round import FalseChunk, Pieces
from silo_wire.checked_chunk import MASTER as MASTER_PART
from silo_wire.checked_chunk import CheckedRound, StepRule
from silo_wire.codecs import secure_codec
from silo_wire.codecs.evidence_codec import checkable_from_bytes
from silo_wire.manifest import ParameterDtype
from silo_wire.plans.plan_optimizer import optimizer_of
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from silo_wire.plans.sections.who_trains import WhoTrains
from tests.support.masked_round import LAYOUT, PLAN, FileFederation, MaskedPlace, t5_deltas
from tests.support.secagg_federation import FEDERATION, identity_key, silo_names

COORDINATOR = identity_key("coordinator")
OPTIMIZERS: list[dict[str, Any]] = [
    {"server_optimizer": "sgd", "momentum": 0.9},
    {"server_optimizer": "adam", "server_learning_rate": 0.01},
    {"server_optimizer": "yogi", "server_learning_rate": 0.01},
    {"server_optimizer": "adagrad", "server_learning_rate": 0.01},
]


def sign(evidence: Evidence) -> SignedEvidence:
    return signed_evidence(evidence, COORDINATOR)


def store_of(place: MaskedPlace) -> RoundEvidence:
    return RoundEvidence(
        place.state / "models", federation=FEDERATION, plan=Digest(PLAN), models=place.models, spools=place.spools
    )


def lineage_of(place: MaskedPlace) -> Lineage:
    model = place.models.initial()
    master = place.models.master(model, place.models.state(model))
    return Lineage.of_plan(
        federation=FEDERATION,
        plan=bytes.fromhex(PLAN),
        master=bytes.fromhex(master.manifest.digest),
        model=bytes.fromhex(model),
    )


def next_round(place: MaskedPlace, store: RoundEvidence, number: int, base: Digest) -> tuple[FileFederation, Digest]:
    """One of the real aggregator in slabs that are no chunks; in the second a masked vector is lost."""
    drops = {silo_names(4)[2]: "masked input"} if number == 2 else None
    federation, digests = place.masked(number, base, t5_deltas(4, number), drops)
    masked = federation.sum_of(digests)
    made = place.aggregator(400_004).aggregate_masked(place.key(number), base, masked)
    store.make(place.key(number), base, masked, made.model, sign)
    return federation, made.model


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("changes", OPTIMIZERS, ids=lambda changes: changes["server_optimizer"])
def test_every_chunk_of_the_coordinators_files_is_made_again(
    tmp_path: Path, changes: dict[str, Any], published: ParameterDtype
) -> None:
    """From what it serves of two rounds alone, also after another process took its files over."""
    place = MaskedPlace.at(tmp_path / "state", changes, published=published)
    store, model, lineage = store_of(place), place.models.initial(), lineage_of(place)
    rule = StepRule(optimizer=optimizer_of(place.section), layout=LAYOUT, model_layout=LAYOUT.as_type(published))
    for number in (1, 2):
        base = model
        federation, model = next_round(place, store, number, base)
        store = store_of(place.reopened())
        checkable = checkable_from_bytes(store.read(model), FEDERATION)
        checkable.signed.check(COORDINATOR.public_key())
        evidence = checkable.evidence
        assert (evidence.before.model.hex(), evidence.after.model.hex()) == (base, model)
        lineage = lineage.after(evidence)
        check = CheckedRound(rule, checkable, opened(evidence, federation.identities, Demands()))
        assert check.chunks == range(3)
        for chunk in check.chunks:
            check.check(chunk, Pieces.of(checkable, store.pieces(model, chunk)), Workspace())
        if number == 2:
            # The optimizer's own state, as it was a step before.
            lie = replace(
                evidence, before=replace(evidence.before, steps=0, slots=()), after=replace(evidence.after, steps=1)
            )
            other = replace(checkable, signed=sign(lie), before=replace(checkable.before, slots={}))
            false = CheckedRound(rule, other, opened(lie, federation.identities, Demands()))
            pieces = Pieces.of(checkable, store.pieces(model, 0))
            with pytest.raises(FalseChunk) as caught:
                false.check(0, replace(pieces, slots={}), Workspace())
            assert caught.value.part == MASTER_PART


def test_a_round_without_labels_is_made_again_at_the_rate_of_those_in_its_sum(tmp_path: Path) -> None:
    """Of three of four, one of whom is lost: 3 / 4 of their mean, and none of the rates of other sums."""
    rates = ServerRates(who=WhoTrains(unlabelled=("*",), labelled_alone="in_turn"))
    place = MaskedPlace.at(tmp_path / "state", {"weighting": "equal"}, rates=rates)
    store, initial = store_of(place), place.models.initial()
    federation, model = next_round(place, store, 2, initial)
    checkable = checkable_from_bytes(store.read(model), FEDERATION)
    assert len(checkable.masked) == 3
    rule = StepRule(optimizer=optimizer_of(place.section), layout=LAYOUT, model_layout=LAYOUT, rates=rates)
    for at_rate, honest in ((rule, True), (replace(rule, rates=UNCHANGED), False)):
        check = CheckedRound(at_rate, checkable, opened(checkable.evidence, federation.identities, Demands()))
        pieces = Pieces.of(checkable, store.pieces(model, 0))
        if honest:
            check.check(0, pieces, Workspace())
            continue
        with pytest.raises(FalseChunk) as caught:
            check.check(0, pieces, Workspace())
        assert caught.value.part == MASTER_PART


def test_what_is_let_go_is_made_again_no_more_and_its_evidence_stays(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", OPTIMIZERS[0])
    store, initial = store_of(place), place.models.initial()
    _, model = next_round(place, store, 1, initial)
    assert store.kept() == (KeptRound(model=model, base=initial, key=place.key(1)),)
    store.let_go(model)
    assert store.kept() == ()
    assert checkable_from_bytes(store.read(model), FEDERATION).evidence.after.model.hex() == model
    with pytest.raises(StateError, match="there no more"):
        store.pieces(model, 0)
    with pytest.raises(StateError, match="no masked sum of this plan made it"):
        store.read(initial)


@pytest.mark.parametrize("chunk", [3, 1 << 31])
def test_a_chunk_that_there_is_not_is_malformed(tmp_path: Path, chunk: int) -> None:
    place = MaskedPlace.at(tmp_path / "state", OPTIMIZERS[0])
    store = store_of(place)
    _, model = next_round(place, store, 1, place.models.initial())
    with pytest.raises(MalformedMessage, match=str(chunk)):
        store.pieces(model, chunk)


def test_vectors_that_are_lost_are_told_by_name(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", OPTIMIZERS[0])
    store = store_of(place)
    _, model = next_round(place, store, 1, place.models.initial())
    place.spools.discard(place.key(1))
    with pytest.raises(StateError, match=f"made model {model} cannot be used"):
        store.pieces(model, 0)


# --- what silos found right


def verdict(evidence: bytes, silo: SiloName, chunks: Iterable[int]) -> Verdict:
    return signed_verdict(evidence, silo, chunks, identity_key(silo))


def digest_of_evidence(store: RoundEvidence, model: Digest) -> bytes:
    return checkable_from_bytes(store.read(model), FEDERATION).evidence.digest


def test_verdicts_stay_beside_the_evidence_also_of_an_older_round_and_after_a_restart(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", OPTIMIZERS[0])
    store, silos = store_of(place), silo_names(4)
    _, first = next_round(place, store, 1, place.models.initial())
    evidence = digest_of_evidence(store, first)
    assert store.verdicts(first) == ()
    whole, part = verdict(evidence, silos[1], range(3)), verdict(evidence, silos[1], [0])
    other = verdict(evidence, silos[0], [1, 2])
    assert store.keep_verdict(first, part) == (part,)
    assert store.keep_verdict(first, whole) == (whole,)
    assert store.keep_verdict(first, other) == (other, whole)
    assert store.keep_verdict(first, part) == (other, whole), "of an agent that was started anew"
    of_a_later_key = signed_verdict(evidence, silos[1], range(3), identity_key("a later key"))
    assert store.keep_verdict(first, of_a_later_key) == (other, of_a_later_key)
    assert store.keep_verdict(first, whole) == (other, whole)
    elsewhere = verdict(evidence, silos[0], [0, 1])
    assert store.keep_verdict(first, elsewhere) == (other, whole), "others may have gone on by chunk 2"
    next_round(place, store, 2, first)
    store.let_go(first)
    store = store_of(place.reopened())
    assert store.verdicts(first) == (other, whole)
    assert store.kept()[0].model != first


def test_verdicts_of_silos_that_are_not_in_the_sum_leave_room_for_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo takes no more than MAX_COHORT of them in one reply."""
    monkeypatch.setattr(secure_codec, "MAX_COHORT", 6)
    place = MaskedPlace.at(tmp_path / "state", OPTIMIZERS[0])
    store = store_of(place)
    _, model = next_round(place, store, 1, place.models.initial())
    evidence = digest_of_evidence(store, model)
    inside = sorted(checkable_from_bytes(store.read(model), FEDERATION).masked)
    outside = [SiloName(f"outside-{number}") for number in range(7 - len(inside))]
    for silo in outside[:-1]:
        store.keep_verdict(model, verdict(evidence, silo, [0]))
    with pytest.raises(StateError, match="is not in the sum that made model"):
        store.keep_verdict(model, verdict(evidence, outside[-1], [0]))
    store.keep_verdict(model, verdict(evidence, outside[0], [0, 1]))
    for silo in inside:
        kept = store.keep_verdict(model, verdict(evidence, silo, [0]))
    assert {it.silo for it in kept} == {*inside, *outside[:-1]}


def test_a_verdict_on_other_evidence_or_on_chunks_that_there_are_not_is_not_kept(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", OPTIMIZERS[0])
    store, silo = store_of(place), silo_names(1)[0]
    initial = place.models.initial()
    _, model = next_round(place, store, 1, initial)
    with pytest.raises(StateError, match="is on evidence 000000000000, that of model"):
        store.keep_verdict(model, verdict(bytes(32), silo, [0]))
    with pytest.raises(MalformedMessage, match="more than the 3 chunks"):
        store.keep_verdict(model, verdict(digest_of_evidence(store, model), silo, [3]))
    with pytest.raises(StateError, match="no masked sum of this plan made it"):
        store.keep_verdict(initial, verdict(bytes(32), silo, [0]))
    assert store.verdicts(model) == store.verdicts(initial) == ()
    (place.state / "models" / "evidence" / f"{model}.verdicts").write_bytes(b"\xff")
    with pytest.raises(IntegrityError, match=r"verdicts was damaged .*restore it from a backup"):
        store.verdicts(model)


async def test_silos_hear_of_each_others_verdicts_and_of_those_before_a_restart(tmp_path: Path) -> None:
    place = MaskedPlace.at(tmp_path / "state", OPTIMIZERS[0])
    store, silos = store_of(place), silo_names(4)
    _, model = next_round(place, store, 1, place.models.initial())
    evidence, plan = digest_of_evidence(store, model), Digest(PLAN)

    def process() -> RoundChecks:
        async def opened(plan: Digest) -> Any:
            return SimpleNamespace(parts=SimpleNamespace(evidence=store_of(place.reopened())))

        desk: Any = SimpleNamespace(opened=opened)
        return RoundChecks(desk=desk, keys=cast(Any, None), spools=place.spools, wait_s=60.0)

    async def share(by: SiloName, verdict: Verdict, known: int = 0) -> tuple[Collection[Verdict], int]:
        return await checks.share(by, plan, model, verdict, known, identity_key=identity_key(by).public_key())

    checks = process()
    one, other = verdict(evidence, silos[0], [0]), verdict(evidence, silos[1], [1])
    told, known = await share(silos[0], one)
    assert told == (one,)
    waiting = asyncio.create_task(share(silos[0], one, known))
    told, _ = await share(silos[1], other)
    assert told == (await waiting)[0] == (one, other)
    with pytest.raises(AuthorisationError, match="only its own is taken"):
        await share(silos[2], other)
    with pytest.raises(IntegrityError, match=f"verdict of silo {silos[0]} on model {model} is not signed"):
        await share(silos[0], signed_verdict(evidence, silos[0], [0, 1], identity_key("a key that it gave up")))
    checks = process()
    assert await checks.verdicts(plan, model) == (one, other)
    third = verdict(evidence, silos[2], [2])
    told, _ = await share(silos[2], third)
    assert told == (one, other, third)
