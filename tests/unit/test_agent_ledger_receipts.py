"""Receipts of the coordinator at the silo: what is kept, what shows that a ledger went back, what a hostile coordinator
can do."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica_security.audit.chain import NO_ENTRY, Head
from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.host.files import write_private
from lorica_security.identity.identity_key import new_identity_key, sign
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.accounting import Budget, GaussianRelease
from lorica_security.privacy.ledger import head_of
from silo_agent.edges.accounts.privacy_ledger import LedgerReceiptFile
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.service.privacy import PrivacyGuard
from silo_wire.canonical import digest_of
from silo_wire.codecs.ledger_receipt import (
    LEDGER_DOMAIN,
    LedgerReceipt,
    head_from_wire,
    ledger_statement,
    receipt_from_wire,
    receipt_to_wire,
)
from silo_wire.messages import RoundKey
from silo_wire.plans.privacy import Release
from silo_wire.v1 import federation_pb2
from tests.support.federation_peer import FEDERATION, SILO, TestNet

NET = TestNet.create()
WHO = NET.credentials("127.0.0.1:1")
ROUND: list[Release] = [("gradients", GaussianRelease(5.0)), ("loss_reduction", GaussianRelease(20.0))]


class Heads:
    def __init__(self) -> None:
        self.head = Head()

    def ledger_head(self) -> Head:
        return self.head

    def record_ledger_head(self, head: Head) -> None:
        self.head = head


def signed(head: Head, *, silo: str = SILO, key: Ed25519PrivateKey = NET.coordinator_key) -> LedgerReceipt:
    statement = ledger_statement(federation=FEDERATION, silo=silo, head=head)
    return LedgerReceipt(newest=head, signature=sign(key, domain=LEDGER_DOMAIN.encode(), payload=statement))


@dataclass
class Coordinator:
    """Remembers and signs; `answers` says something else first."""

    known: Head | None = None
    answers: list[Head] = field(default_factory=list)
    asked: list[tuple[Head, Head]] = field(default_factory=list)

    async def countersign_ledger(self, head: Head, *, after: Head) -> LedgerReceipt:
        self.asked.append((head, after))
        if self.answers:
            return signed(self.answers.pop(0))
        if self.known is None or (self.known == after and after.sequence < head.sequence):
            self.known = head
        return signed(self.known)


class SiloDisk:
    """The ledger, the journal's head and the receipt of one silo; `snapshot` and `restore` are of all of them
    together."""

    def __init__(self, folder: Path, credentials: SiloCredentials = WHO) -> None:
        self.file = PrivacyLedgerFile(folder / "privacy" / "ledger")
        self.receipt_path = folder / "privacy" / "receipt.json"
        self.receipts = LedgerReceiptFile(self.receipt_path, credentials)
        self.heads = Heads()

    def guard(self) -> PrivacyGuard:
        return PrivacyGuard(
            ledger=self.file,
            heads=self.heads,
            receipts=self.receipts,
            budget=Budget(epsilon=100.0, dp_delta=1e-5),
            clock=lambda: 1_800_000_000.5,
            where=str(self.file.path),
        )

    def spend(self, round_number: int) -> Head:
        key = RoundKey(federation=FEDERATION, plan=digest_of(b"plan"), round=round_number, attempt=1)
        self.guard().spend(key, ROUND, unit="")
        return head_of(self.guard().entries())

    def snapshot(self) -> Callable[[], None]:
        kept = {path: path.read_bytes() for path in (self.file.path, self.receipt_path) if path.exists()}
        head = self.heads.head

        def restore() -> None:
            for path in (self.file.path, self.receipt_path):
                path.unlink(missing_ok=True)
            for path, content in kept.items():
                write_private(path, content)
            self.heads.head = head

        return restore


@pytest.fixture
def disk(tmp_path: Path) -> SiloDisk:
    return SiloDisk(tmp_path)


async def test_each_head_is_countersigned_once_and_the_receipt_is_kept(disk: SiloDisk) -> None:
    coordinator = Coordinator()
    await disk.guard().countersign(coordinator)
    first = disk.spend(1)
    await disk.guard().countersign(coordinator)
    await disk.guard().countersign(coordinator)
    assert coordinator.asked == [(Head(), Head()), (first, Head()), (first, first)]
    assert coordinator.known == first
    assert disk.guard().receipt() == signed(first)
    assert disk.receipt_path.stat().st_mode & 0o077 == 0


async def test_a_machine_put_back_from_a_snapshot_is_told_how_far_its_ledger_was(disk: SiloDisk) -> None:
    """Ledger, journal and receipt went back together: nothing on this disk shows it."""
    coordinator = Coordinator()
    disk.spend(1)
    await disk.guard().countersign(coordinator)
    restore = disk.snapshot()
    disk.spend(2)
    await disk.guard().countersign(coordinator)
    restore()
    assert len(disk.guard().entries()) == 2
    for _ in range(2):  # it stays so, however often it asks
        with pytest.raises(IntegrityError) as found:
            await disk.guard().countersign(coordinator)
        assert f"{disk.file.path} ends with entry 2, but the coordinator knows entry 4" in str(found.value)
        assert "Put the newest ledger back" in str(found.value)


async def test_a_ledger_that_was_restored_and_went_on_has_another_entry(disk: SiloDisk) -> None:
    """Longer than what the coordinator knows, and yet not what it knows."""
    coordinator = Coordinator()
    restore = disk.snapshot()
    disk.spend(1)
    await disk.guard().countersign(coordinator)
    restore()
    for number in (7, 8, 9):
        disk.spend(number)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="has another entry 2 than the coordinator knows"):
            await disk.guard().countersign(coordinator)
    assert coordinator.known is not None
    assert coordinator.known.sequence == 2


async def test_a_lost_answer_or_receipt_costs_one_more_question(disk: SiloDisk) -> None:
    coordinator = Coordinator()
    first = disk.spend(1)
    await disk.guard().countersign(coordinator)
    disk.receipt_path.unlink()
    second = disk.spend(2)
    await disk.guard().countersign(coordinator)
    assert coordinator.asked[1:] == [(second, Head()), (second, first)]
    assert disk.guard().receipt() == signed(second)


async def test_a_coordinator_that_was_itself_restored_is_told_from_where_it_is(disk: SiloDisk) -> None:
    coordinator = Coordinator()
    first = disk.spend(1)
    await disk.guard().countersign(coordinator)
    second = disk.spend(2)
    await disk.guard().countersign(coordinator)
    coordinator.known = first
    await disk.guard().countersign(coordinator)
    assert coordinator.known == second
    await disk.guard().countersign(Coordinator())  # and one that knows nothing


async def test_a_coordinator_that_stays_with_an_older_entry_gets_no_release(disk: SiloDisk) -> None:
    first = disk.spend(1)
    disk.spend(2)
    lying = Coordinator(answers=[first, first])
    with pytest.raises(IntegrityError, match=r"does not countersign entry 4 .* it stays with entry 2"):
        await disk.guard().countersign(lying)
    lying = Coordinator(answers=[Head(), Head()])
    with pytest.raises(IntegrityError, match="it stays with entry 0"):
        await disk.guard().countersign(lying)
    assert disk.guard().receipt() is None


@pytest.mark.parametrize("sequence", [2, 4, 6])
async def test_a_coordinator_that_names_an_entry_that_never_was_stops_the_silo_and_no_more(
    disk: SiloDisk, sequence: int
) -> None:
    disk.spend(1)
    disk.spend(2)
    lying = Coordinator(answers=[Head(sequence, "ab" * 32)])
    with pytest.raises(IntegrityError, match=f"entry {sequence}"):
        await disk.guard().countersign(lying)
    assert len(disk.guard().entries()) == 4


async def test_a_receipt_outlives_the_journal(disk: SiloDisk) -> None:
    """The ledger and the journal were put back, the receipt was not: no question is needed."""
    disk.spend(1)
    restore = disk.snapshot()
    disk.spend(2)
    await disk.guard().countersign(Coordinator())
    kept = disk.receipt_path.read_bytes()
    restore()
    write_private(disk.receipt_path, kept)
    with pytest.raises(IntegrityError, match="ends with entry 2, but the coordinator's receipt knows entry 4"):
        disk.guard().check(ROUND, unit="")


def test_a_receipt_of_nobody_or_of_another_silo_is_none(disk: SiloDisk) -> None:
    head = disk.spend(1)
    for receipt in (
        signed(head, key=new_identity_key()),
        signed(head, silo="bank-b"),
        replace(signed(head), newest=Head()),
    ):
        write_private(disk.receipt_path, receipt.to_json())
        with pytest.raises(IntegrityError, match="is not signed by this federation's coordinator for silo hospital-a"):
            disk.guard().entries()


@pytest.mark.parametrize(
    "raw", [b"", b"{}", b"[]", b"null", b"\xff", b'{"digest":"00","sequence":1,"signature":"00"}', b"[" * 10_000]
)
def test_a_file_that_is_no_receipt_is_named(disk: SiloDisk, raw: bytes) -> None:
    disk.spend(1)
    write_private(disk.receipt_path, raw)
    with pytest.raises(IntegrityError, match=f"{disk.receipt_path} is no receipt"):
        disk.guard().entries()


def test_a_receipt_comes_back_from_file_and_wire() -> None:
    receipt = signed(Head(7, "cd" * 32))
    assert LedgerReceipt.from_json(receipt.to_json(), "f") == receipt
    assert receipt_from_wire(receipt_to_wire(receipt)) == receipt
    with pytest.raises(IntegrityError):
        LedgerReceipt.from_json(receipt.to_json() + b" ", "f")


@pytest.mark.parametrize(
    "head",
    [
        federation_pb2.LedgerHead(sequence=1, digest=b"\1" * 31),
        federation_pb2.LedgerHead(sequence=0, digest=b"\1" * 32),
        federation_pb2.LedgerHead(sequence=3, digest=bytes.fromhex(NO_ENTRY)),
        federation_pb2.LedgerHead(sequence=(1 << 64) - 1, digest=b"\1" * 32),
    ],
    ids=["short", "none-with-digest", "entry-without", "beyond-any-ledger"],
)
def test_what_is_no_head_is_not_taken(head: federation_pb2.LedgerHead) -> None:
    with pytest.raises(MalformedMessage, match="ledger head"):
        head_from_wire(head, "head")
    with pytest.raises(MalformedMessage):
        receipt_from_wire(federation_pb2.LedgerReceipt(newest=head, signature=b"s" * 64))
