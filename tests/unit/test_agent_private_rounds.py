"""Private rounds of an agent with its real client, journal, ledger and policy, against a coordinator that is hostile
where a test says so.

What is asked throughout: nothing leaves that is not in the ledger, nothing is paid for twice that was saved, nothing is
forgotten.
"""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorica_security.audit.chain import Head
from lorica_security.errors import DataError, StateError
from lorica_security.identity.identity_key import new_identity_key, sign, verify
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.ledger import head_of
from silo_agent.edges.disk.round_journal import LastModel, RoundJournal
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.policy.rules import PolicyRules
from silo_agent.service.told import BUDGET_SPENT, FAILED, NOT_INTACT
from silo_wire.codecs.ledger_receipt import LEDGER_DOMAIN, LedgerReceipt, ledger_statement
from silo_wire.messages import DeclineReason, Evaluate, Prepare, RoundKey, Standby, StandbyReason, Train
from silo_wire.statements import UPDATE_DOMAIN, update_statement
from tests.support.federation_peer import (
    FEDERATION,
    SILO,
    FederationPeer,
    OfferedModel,
    ReceivedUpdate,
    small_bundle,
    vector_of,
)
from tests.unit.test_agent_service import NET, Silo
from tests.unit.test_agent_service import peer as peer

BUNDLE = small_bundle(
    privacy={
        "level": "record",
        "target_epsilon": 5.0,
        "nominal_records": 64,
        "expected_batch_size": 64,  # all of them: the accountant has a closed form
        "steps": 2,
        "noise_multiplier": 8.0,
        "loss_noise_multiplier": 20.0,
    },
    training={"max_grad_norm": 1.0, "epochs": 1, "dropout": 0.0},
    evaluation={"initial": False, "every": 0, "last": False},
)
PLAN = BUNDLE.plan.digest
KEY = RoundKey(federation=FEDERATION, plan=PLAN, round=1, attempt=1)
OF_A_ROUND = len(BUNDLE.plan.releases_of_round)


class Killed(Exception):
    """The process goes at this point, without a word."""


@pytest.fixture
def silo(peer: FederationPeer, tmp_path: Path) -> Silo:
    return Silo(tmp_path / "silo", NET.credentials(peer.address))


@pytest.fixture
def model(peer: FederationPeer) -> OfferedModel:
    return peer.offer(BUNDLE, vector_of(BUNDLE.layout, 1))


@pytest.fixture
def other(peer: FederationPeer) -> OfferedModel:
    return peer.offer(BUNDLE, vector_of(BUNDLE.layout, 2))


def train(of: OfferedModel, *, round_number: int = 1, attempt: int = 1) -> Train:
    return Train(key=replace(KEY, round=round_number, attempt=attempt), model=of.digest, seconds_left=60.0)


def ledger(silo: Silo) -> PrivacyLedgerFile:
    return PrivacyLedgerFile(silo.folder.privacy_ledger)


def committed(peer: FederationPeer) -> list[ReceivedUpdate]:
    return [update for update in peer.updates.values() if update.committed]


def gauge(silo: Silo, name: str) -> float | None:
    return silo.metrics.registry.get_sample_value(name)


async def declined(peer: FederationPeer) -> tuple[DeclineReason, str]:
    await peer.until(lambda: bool(peer.declined))
    return peer.declined[-1][1:]


# ---- the order in which things become durable -----------------------------------------------------------------------


async def test_the_ledger_the_journal_and_the_coordinator_know_before_anything_says_that_there_is_an_update(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    at_receipt: list[tuple[int, Head, bool, bool]] = []

    def look(receipt: LedgerReceipt) -> LedgerReceipt:
        saved, sent = silo.journal.saved_update() is not None, bool(peer.updates or peer.declined)
        at_receipt.append((len(ledger(silo).entries()), silo.journal.ledger_head(), saved, sent))
        return receipt

    peer.change_receipt = look
    async with silo.running():
        await peer.order(train(model))
        await peer.until(lambda: bool(committed(peer)))
        await silo.notes.outcomes(1)
    head = head_of(ledger(silo).entries())
    assert head.sequence == OF_A_ROUND
    assert at_receipt == [
        (0, Head(), False, False),  # before the plan is prepared
        (0, Head(), False, False),  # before training
        (OF_A_ROUND, head, False, False),  # before the update is journalled
        (OF_A_ROUND, head, True, False),  # before it is uploaded
    ]
    assert peer.ledger_heads == {SILO: head}
    assert gauge(silo, "lorica_silo_epsilon_spent") == pytest.approx(0.929, abs=1e-3)
    assert gauge(silo, "lorica_silo_epsilon_allowed") == 10.0


async def test_an_update_waits_until_its_entry_is_countersigned(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    async with silo.running():
        await peer.order(Prepare(PLAN))
        await peer.until(lambda: bool(peer.readiness))
        silo.trainer.hold = True
        await peer.order(train(model))
        await silo.training_began()
        peer.receipts_lost = 3
        silo.trainer.go.set()
        await peer.until(lambda: bool(committed(peer)))
    assert peer.receipts_lost == 0
    assert len(ledger(silo).entries()) == OF_A_ROUND
    assert silo.trainer.trained == [KEY]


# ---- what was released once is sent again ---------------------------------------------------------------------------


async def test_the_next_attempt_from_the_same_model_gets_the_same_update_and_no_second_entry(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    async with silo.running():
        await peer.order(train(model))
        await silo.notes.outcomes(1)
        first = committed(peer)[0]
        data, digest = first.data, first.header.manifest.digest
        peer.updates.clear()  # another attempt is another spool
        await peer.order(train(model, attempt=2))
        await silo.notes.outcomes(2)
    (second,) = committed(peer)
    assert (second.data, second.header.manifest.digest) == (data, digest)
    assert second.header.key == replace(KEY, attempt=2)
    statement = update_statement(
        key=second.header.key, silo=SILO, model=model.digest, update=digest, summary=second.header.summary
    )
    verify(
        silo.credentials.identity_key.public_key(),
        domain=UPDATE_DOMAIN.encode(),
        payload=statement,
        signature=second.header.signature,
    )
    assert silo.trainer.trained == [KEY]
    assert [(entry.round, entry.attempt) for entry in ledger(silo).entries()] == [(1, 1)] * OF_A_ROUND
    assert silo.outcomes() == [(1, "training", "uploaded"), (1, "training", "uploaded")]


async def test_an_attempt_that_was_abandoned_while_its_update_left_is_not_paid_for_again_after_a_restart(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    await peer.order(train(model))
    peer.cut_upload_after, peer.deaf = 2, True
    async with silo.killed():
        await peer.until(lambda: not peer.cut_upload_after)
    peer.deaf = False
    peer.updates.clear()
    await peer.order(train(model, attempt=3))
    async with silo.running():
        await silo.notes.outcomes(1)
        assert silo.journal.saved_update() is not None
        assert silo.journal.update_file(replace(KEY, attempt=3)).exists()
        assert len(list(silo.folder.updates.glob("*.delta"))) == 1
    assert [update.header.key.attempt for update in committed(peer)] == [3]
    assert silo.trainer.trained == [KEY]
    assert len(ledger(silo).entries()) == OF_A_ROUND


@pytest.mark.parametrize("changed", ["model", "round"])
async def test_another_model_or_round_is_trained_and_paid_for(
    peer: FederationPeer, silo: Silo, model: OfferedModel, other: OfferedModel, changed: str
) -> None:
    again = train(other, attempt=2) if changed == "model" else train(model, round_number=2)
    async with silo.running():
        await peer.order(train(model))
        await silo.notes.outcomes(1)
        await peer.order(again)
        await silo.notes.outcomes(2)
    assert silo.trainer.trained == [KEY, again.key]
    assert len(ledger(silo).entries()) == 2 * OF_A_ROUND


# ---- crashes --------------------------------------------------------------------------------------------------------


def dies_at_the_head(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
    """The entry is in the ledger, the journal does not know."""
    whole = RoundJournal.record_ledger_head

    def record(journal: RoundJournal, head: Head) -> None:
        die()
        whole(journal, head)

    patch.setattr(RoundJournal, "record_ledger_head", record)


def dies_before_countersigning(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
    whole = GrpcCoordinator.countersign_ledger

    async def countersign(client: GrpcCoordinator, head: Head, *, after: Head) -> LedgerReceipt:
        if head.sequence:
            die()
        return await whole(client, head, after=after)

    patch.setattr(GrpcCoordinator, "countersign_ledger", countersign)


def dies_with_the_receipt_under_way(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
    """The coordinator knows the head, the silo does not know that it does."""
    whole = GrpcCoordinator.countersign_ledger

    async def countersign(client: GrpcCoordinator, head: Head, *, after: Head) -> LedgerReceipt:
        receipt = await whole(client, head, after=after)
        if head.sequence:
            die()
        return receipt

    patch.setattr(GrpcCoordinator, "countersign_ledger", countersign)


def dies_before_the_update_is_journalled(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
    whole = RoundJournal._record_update

    def record(journal: RoundJournal, update: Any) -> None:
        die()
        whole(journal, update)

    patch.setattr(RoundJournal, "_record_update", record)


def dies_before_the_upload(patch: pytest.MonkeyPatch, die: Callable[[], None]) -> None:
    whole = GrpcCoordinator.upload

    async def upload(client: GrpcCoordinator, *arguments: Any, **named: Any) -> Any:
        die()
        return await whole(client, *arguments, **named)

    patch.setattr(GrpcCoordinator, "upload", upload)


@pytest.mark.parametrize(
    ("point", "trainings"),
    [
        (dies_at_the_head, 2),
        (dies_before_countersigning, 2),
        (dies_with_the_receipt_under_way, 2),
        (dies_before_the_update_is_journalled, 2),
        (dies_before_the_upload, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_a_crash_between_any_two_steps_may_waste_an_entry_and_forgets_none(
    peer: FederationPeer,
    silo: Silo,
    model: OfferedModel,
    monkeypatch: pytest.MonkeyPatch,
    point: Callable[[pytest.MonkeyPatch, Callable[[], None]], None],
    trainings: int,
) -> None:
    left = [1]

    def die() -> None:
        if left:
            left.pop()
            raise Killed

    point(monkeypatch, die)
    await peer.order(train(model))
    async with silo.running():
        await asyncio.wait([silo.run])
        assert isinstance(silo.run.exception(), Killed)
    assert committed(peer) == []
    before = ledger(silo).entries()
    assert len(before) == OF_A_ROUND
    async with silo.running():
        await silo.notes.outcomes(1)
    entries = ledger(silo).entries()
    assert entries[:OF_A_ROUND] == before
    assert len(silo.trainer.trained) == trainings
    assert len(entries) == trainings * OF_A_ROUND
    assert len(committed(peer)) == 1
    assert peer.ledger_heads == {SILO: head_of(entries)}


# ---- a ledger that is not the one that it was -----------------------------------------------------------------------


async def one_round(peer: FederationPeer, silo: Silo, order: Train) -> None:
    await peer.order(order)
    async with silo.running():
        await silo.notes.outcomes(len(silo.notes.of("round")) + 1)
    await peer.order(Standby(StandbyReason.NO_PLAN))


async def test_a_machine_put_back_from_a_snapshot_is_not_ready_and_trains_and_sends_nothing(
    peer: FederationPeer, silo: Silo, model: OfferedModel, other: OfferedModel, tmp_path: Path
) -> None:
    await one_round(peer, silo, train(model))
    shutil.copytree(silo.folder.root, tmp_path / "snapshot")
    await one_round(peer, silo, train(other, round_number=2))
    shutil.rmtree(silo.folder.root)
    shutil.copytree(tmp_path / "snapshot", silo.folder.root)
    sent, spent = len(peer.updates), silo.trainer.trained.copy()
    await peer.order(Prepare(PLAN))
    async with silo.running():
        await peer.until(lambda: len(peer.readiness) == 1)
        assert peer.readiness == [(PLAN, False, NOT_INTACT)]
        await peer.order(train(model, round_number=3))
        assert await declined(peer) == (DeclineReason.INTEGRITY, NOT_INTACT)
        (why,) = {fields["detail"] for fields in silo.notes.of("work-failed")}
        assert f"{silo.folder.privacy_ledger} ends with entry 2, but the coordinator knows entry 4" in why
        assert "Put the newest ledger back" in why
    assert (len(peer.updates), silo.trainer.trained) == (sent, spent)
    assert len(ledger(silo).entries()) == OF_A_ROUND


def cut(silo: Silo) -> str:
    lines = silo.folder.privacy_ledger.read_bytes().splitlines(keepends=True)
    silo.folder.privacy_ledger.write_bytes(lines[0])
    return "ends with entry 1, but the round journal knows entry 2"


def cut_with_the_journal(silo: Silo) -> str:
    lines = silo.folder.privacy_ledger.read_bytes().splitlines(keepends=True)
    silo.folder.privacy_ledger.write_bytes(lines[0])
    journal = RoundJournal(silo.folder.journal, updates=silo.folder.updates, silo=SILO)
    journal.record_ledger_head(head_of(ledger(silo).entries()))
    journal.close()
    return "ends with entry 1, but the coordinator's receipt knows entry 2"


def cut_with_journal_and_receipt(silo: Silo) -> str:
    cut_with_the_journal(silo)
    silo.folder.privacy_receipt.unlink()
    return "ends with entry 1, but the coordinator knows entry 2"


def edited(silo: Silo) -> str:
    path = silo.folder.privacy_ledger
    path.write_bytes(path.read_bytes().replace((8.0).hex().encode(), (80.0).hex().encode()))
    return "does not have the digest that it names"


def written_anew(silo: Silo) -> str:
    """By somebody who knows how: cheaper entries, digests that fit, a journal that fits, no receipt."""
    lines: list[bytes] = []
    entries = []
    for entry in ledger(silo).entries():
        head = head_of(entries)
        entries.append(replace(entry, previous=head.digest, release=replace(entry.release, noise_multiplier=80.0)))
        lines.append(entries[-1].line())
    silo.folder.privacy_ledger.write_bytes(b"".join(lines))
    journal = RoundJournal(silo.folder.journal, updates=silo.folder.updates, silo=SILO)
    journal.record_ledger_head(head_of(entries))
    journal.close()
    silo.folder.privacy_receipt.unlink()
    return "has another entry 2 than the coordinator knows"


@pytest.mark.parametrize("tamper", [cut, cut_with_the_journal, cut_with_journal_and_receipt, edited, written_anew])
async def test_a_ledger_that_was_cut_edited_or_written_anew_ends_all_release(
    peer: FederationPeer, silo: Silo, model: OfferedModel, tamper: Callable[[Silo], str]
) -> None:
    await one_round(peer, silo, train(model))
    expected = tamper(silo)
    kept = silo.folder.privacy_ledger.read_bytes()
    await peer.order(train(model, round_number=2))
    async with silo.running():
        assert await declined(peer) == (DeclineReason.INTEGRITY, NOT_INTACT)
    assert expected in silo.notes.of("work-failed")[-1]["detail"]
    assert silo.trainer.trained == [KEY]
    assert len(committed(peer)) == 1
    assert silo.folder.privacy_ledger.read_bytes() == kept


# ---- a coordinator that lies ----------------------------------------------------------------------------------------


def of_nobody(receipt: LedgerReceipt) -> LedgerReceipt:
    statement = ledger_statement(federation=FEDERATION, silo=SILO, head=receipt.newest)
    return replace(receipt, signature=sign(new_identity_key(), domain=LEDGER_DOMAIN.encode(), payload=statement))


def of_another_silo(receipt: LedgerReceipt) -> LedgerReceipt:
    statement = ledger_statement(federation=FEDERATION, silo="bank-b", head=receipt.newest)
    return replace(receipt, signature=sign(NET.coordinator_key, domain=LEDGER_DOMAIN.encode(), payload=statement))


def signed(head: Head) -> LedgerReceipt:
    statement = ledger_statement(federation=FEDERATION, silo=SILO, head=head)
    return LedgerReceipt(
        newest=head, signature=sign(NET.coordinator_key, domain=LEDGER_DOMAIN.encode(), payload=statement)
    )


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        (of_nobody, "does not match"),
        (of_another_silo, "does not match"),
        (lambda receipt: signed(Head()), "it stays with entry 0"),
        (lambda receipt: signed(Head(OF_A_ROUND, "ab" * 32)), "has another entry 2 than the coordinator knows"),
        (lambda receipt: signed(Head(99, "ab" * 32)), "but the coordinator knows entry 99"),
    ],
    ids=["signed-by-nobody", "of-another-silo", "a-lower-head", "another-head", "a-head-that-never-was"],
)
async def test_without_a_right_receipt_for_the_entry_nothing_leaves(
    peer: FederationPeer, silo: Silo, model: OfferedModel, lie: Callable[[LedgerReceipt], LedgerReceipt], found: str
) -> None:
    peer.change_receipt = lambda receipt: lie(receipt) if receipt.newest.sequence else receipt
    async with silo.running():
        await peer.order(train(model))
        assert await declined(peer) == (DeclineReason.INTEGRITY, NOT_INTACT)
        assert silo.journal.saved_update() is None
    assert found in silo.notes.of("work-failed")[-1]["detail"]
    assert peer.updates == {}
    assert len(ledger(silo).entries()) == OF_A_ROUND  # the budget is gone, which is the worst that it comes to


# ---- the budget -----------------------------------------------------------------------------------------------------


async def test_a_silo_whose_budget_is_spent_declines_says_so_stays_and_keeps_the_model(
    peer: FederationPeer, silo: Silo, model: OfferedModel, other: OfferedModel
) -> None:
    silo.rules = PolicyRules(max_epsilon=1.4)  # three rounds cost 1.33 by the filter, four 1.56
    async with silo.running():
        for attempt, of in enumerate((model, other, model), 1):
            await peer.order(train(of, attempt=attempt))
            await silo.notes.outcomes(attempt)
        await peer.order(train(other, attempt=4))
        assert await declined(peer) == (DeclineReason.POLICY, BUDGET_SPENT)
        assert silo.journal.last_model() == LastModel(plan=PLAN, model=other.digest)
        assert not silo.run.done()
    assert len(silo.trainer.trained) == 3
    assert len(ledger(silo).entries()) == 3 * OF_A_ROUND
    assert silo.refusals() == ["max_epsilon"]
    assert gauge(silo, "lorica_silo_epsilon_spent") == pytest.approx(1.325, abs=1e-3)
    assert gauge(silo, "lorica_silo_epsilon_allowed") == 1.4
    assert "epsilon 1.56" in silo.notes.of("refused")[-1]["detail"]
    peer.readiness.clear()
    await peer.order(Prepare(PLAN))
    async with silo.running():  # the agent starts, and is not ready
        await peer.until(lambda: bool(peer.readiness))
        assert peer.readiness == [(PLAN, False, BUDGET_SPENT)]
        await peer.order(train(other, round_number=2))
        await peer.until(lambda: len(peer.declined) == 2)
        assert peer.declined[1][1:] == (DeclineReason.POLICY, BUDGET_SPENT)
        assert silo.journal.last_model() == LastModel(plan=PLAN, model=other.digest)
        assert not silo.run.done()


# ---- what is said of failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure", [DataError("train.jsonl line 7 of 1203: mr smith"), StateError("loss 4.2 is not finite")]
)
async def test_a_failure_is_told_in_words_that_are_always_the_same(
    peer: FederationPeer, silo: Silo, model: OfferedModel, failure: Any
) -> None:
    silo.trainer.failure = failure
    async with silo.running():
        await peer.order(train(model))
        assert await declined(peer) == (DeclineReason.TRAINING_FAILED, FAILED)
    assert ledger(silo).entries() == ()


async def test_data_that_cannot_be_used_make_a_silo_unready_in_the_same_words(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    silo.trainer.unusable_data = DataError("train.jsonl has 3 bad lines of 1203")
    async with silo.running():
        await peer.order(train(model))
        assert await declined(peer) == (DeclineReason.TRAINING_FAILED, FAILED)
        await peer.until(lambda: bool(peer.readiness))
    assert peer.readiness == [(PLAN, False, FAILED)]


async def test_a_coordinator_that_asks_for_a_score_all_the_same_gets_none(
    peer: FederationPeer, silo: Silo, model: OfferedModel
) -> None:
    async with silo.running():
        await peer.order(Evaluate(key=KEY, model=model.digest, seconds_left=60.0))
        assert await declined(peer) == (
            DeclineReason.POLICY,
            "scores of round 1 were ordered, at which the plan has none",
        )
    assert peer.evaluations == []
    assert silo.refusals() == ["as_planned"]
