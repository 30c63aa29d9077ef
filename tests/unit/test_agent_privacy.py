"""The ledger on disk and the guard before it: what is written before a release, what is refused, what a crash
leaves."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_security.audit.chain import Head
from lorica_security.errors import ConfigurationError, IntegrityError, PolicyRefusal, StorageError
from lorica_security.host.files import write_private
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.accounting import Budget, GaussianRelease, epsilon_of, merged
from lorica_security.privacy.ledger import Entry, head_of
from lorica_security.privacy.renyi_filter import favoured_order, filtered_epsilon
from silo_agent.service.privacy import PrivacyGuard
from silo_wire.canonical import digest_of
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.messages import RoundKey
from silo_wire.plans.privacy import Release

ROUND: list[Release] = [("gradients", GaussianRelease(5.0)), ("loss_reduction", GaussianRelease(20.0))]
BUDGET = Budget(epsilon=1.5, dp_delta=1e-5)


class Heads:
    def __init__(self) -> None:
        self.head = Head()

    def ledger_head(self) -> Head:
        return self.head

    def record_ledger_head(self, head: Head) -> None:
        self.head = head


class CrashBeforeHead(Heads):
    def record_ledger_head(self, head: Head) -> None:
        raise KeyboardInterrupt


def key(round_number: int, attempt: int = 1) -> RoundKey:
    return RoundKey(federation="north", plan=digest_of(b"plan"), round=round_number, attempt=attempt)


@pytest.fixture
def file(tmp_path: Path) -> PrivacyLedgerFile:
    return PrivacyLedgerFile(tmp_path / "privacy" / "ledger")


class NoReceipts:
    def newest(self) -> None:
        return None

    def keep(self, receipt: LedgerReceipt) -> None:
        raise AssertionError("nobody countersigned")


def guard(file: PrivacyLedgerFile, heads: Heads, budget: Budget = BUDGET) -> PrivacyGuard:
    return PrivacyGuard(
        ledger=file,
        heads=heads,
        receipts=NoReceipts(),
        budget=budget,
        clock=lambda: 1_800_000_000.5,
        where=str(file.path),
    )


def test_what_is_spent_is_in_the_file_and_in_the_head(file: PrivacyLedgerFile) -> None:
    heads = Heads()
    guard(file, heads).spend(key(1), ROUND, unit="")
    entries = guard(file, heads).entries()
    assert [(entry.round, entry.mechanism, entry.release) for entry in entries] == [(1, *release) for release in ROUND]
    assert heads.head == head_of(entries) == Head(2, entries[1].digest)
    assert file.path.stat().st_mode & 0o077 == 0


def test_attack_a_link_that_leads_nowhere_is_not_taken_for_an_empty_ledger(file: PrivacyLedgerFile) -> None:
    file.path.parent.mkdir(mode=0o700)
    file.path.symlink_to("/not/mounted")
    with pytest.raises(ConfigurationError, match="is a link to /not/mounted, which is missing"):
        guard(file, Heads()).entries()


def test_rounds_are_refused_before_they_would_cost_too_much(file: PrivacyLedgerFile) -> None:
    within = guard(file, Heads())
    once = [release for _, release in ROUND]
    order = favoured_order(once, epsilon=1.5, dp_delta=1e-5)
    costs = [filtered_epsilon(once * rounds, favoured=order, dp_delta=1e-5) for rounds in range(9)]
    allowed = max(rounds for rounds, cost in enumerate(costs) if cost <= 1.5)
    assert 1 < allowed < 8
    for number in range(allowed):
        within.spend(key(number + 1), ROUND, unit="")
    before = within.entries()
    with pytest.raises(PolicyRefusal) as refused:
        within.spend(key(allowed + 1), ROUND, unit="")
    assert refused.value.rule == "max_epsilon"
    assert within.entries() == before  # what was refused is not entered
    assert within.spent() == pytest.approx(costs[allowed])
    assert f"{within.spent():.3g} are spent" in str(refused.value)


def test_the_ledger_covers_every_plan(file: PrivacyLedgerFile) -> None:
    heads = Heads()
    guard(file, heads).spend(key(1), ROUND, unit="")
    spent = guard(file, heads).spent()
    guard(file, heads).spend(RoundKey(federation="south", plan=digest_of(b"other"), round=1, attempt=1), ROUND, unit="")
    assert guard(file, heads).spent() > spent


def test_the_first_entry_has_the_order_that_the_filter_favours_from_then_on(file: PrivacyLedgerFile) -> None:
    """Also after a restart, with another budget and other mechanisms: by then it could be chosen by what was
    released."""
    heads = Heads()
    assert guard(file, heads).counted().entries == ()
    guard(file, heads).spend(key(1), ROUND, unit="")
    order = favoured_order([release for _, release in ROUND], epsilon=BUDGET.epsilon, dp_delta=BUDGET.dp_delta)
    other = guard(file, heads, replace(BUDGET, epsilon=9.0))
    other.spend(key(2), [("gradients", GaussianRelease(0.9, 0.02, 20))], unit="")
    assert [entry.order for entry in file.entries()] == [order, 0, 0]
    assert other.counted().orders()[0] == guard(file, heads).counted().orders()[0] == order
    releases = [entry.release for entry in file.entries()]
    assert other.spent() == guard(file, heads).spent() == filtered_epsilon(releases, favoured=order, dp_delta=1e-5)
    assert favoured_order(releases, epsilon=9.0, dp_delta=1e-5) != order


def test_a_ledger_of_an_earlier_release_gets_its_order_by_its_first_round_and_the_budget(
    file: PrivacyLedgerFile,
) -> None:
    """Not by the rounds since: the first mechanism was chosen before anything was released."""
    heads = Heads()
    first = [("gradients", GaussianRelease(5.0)), ("loss_reduction", GaussianRelease(20.0))]
    guard(file, heads).spend(key(1), first, unit="")
    guard(file, heads).spend(key(2), [("gradients", GaussianRelease(2.0, 0.05, 20))], unit="")
    old: list[Entry] = []
    for entry in file.entries():
        old.append(replace(entry, order=0, previous=head_of(old).digest))
    write_private(file.path, b"".join(entry.line() for entry in old))
    heads.head = head_of(old)
    order = favoured_order([release for _, release in first], epsilon=BUDGET.epsilon, dp_delta=BUDGET.dp_delta)
    assert guard(file, heads).counted().orders()[0] == order
    every = [entry.release for entry in old]
    assert favoured_order(every, epsilon=BUDGET.epsilon, dp_delta=BUDGET.dp_delta) != order
    guard(file, heads).spend(key(3), ROUND[1:], unit="")
    guard(file, heads).spend(key(4), ROUND[1:], unit="")
    assert [entry.order for entry in file.entries()] == [0, 0, 0, order, 0]
    assert guard(file, heads, replace(BUDGET, epsilon=9.0)).counted().orders()[0] == order


def test_the_total_of_one_schedule_is_shown_beside_and_decides_nothing(file: PrivacyLedgerFile) -> None:
    heads = Heads()
    within = guard(file, heads)
    assert within.counted().as_one_schedule() == within.spent() == 0.0
    within.spend(key(1), ROUND, unit="")
    within.spend(key(2), ROUND, unit="")
    exact = epsilon_of(merged(release for _, release in ROUND * 2), dp_delta=1e-5)
    assert within.counted().as_one_schedule() == exact < within.spent()
    three = epsilon_of(merged(release for _, release in ROUND * 3), dp_delta=1e-5)
    assert three < BUDGET.epsilon
    with pytest.raises(PolicyRefusal, match="would take the silo's releases to epsilon"):
        within.check(ROUND, unit="")


def test_a_crash_between_entry_and_release_wastes_it_and_forgets_nothing(file: PrivacyLedgerFile) -> None:
    """The journal is one entry behind: the ledger is what counts."""
    heads = Heads()
    guard(file, heads).spend(key(1), ROUND, unit="")
    crashing = CrashBeforeHead()
    crashing.head = heads.head
    with pytest.raises(KeyboardInterrupt):
        guard(file, crashing).spend(key(2), ROUND, unit="")
    again = guard(file, heads, replace(BUDGET, epsilon=2.0))
    assert [entry.round for entry in again.entries()] == [1, 1, 2, 2]
    again.spend(key(2), ROUND, unit="")  # the round is done again, and paid for again
    assert len(again.entries()) == 6
    assert heads.head == head_of(again.entries())


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_an_entry_that_a_crash_tore_was_never_released_and_is_written_over(file: PrivacyLedgerFile, cut: int) -> None:
    heads = Heads()
    guard(file, heads).spend(key(1), ROUND, unit="")
    whole = file.path.read_bytes()
    guard(file, Heads()).spend(key(2), ROUND[:1], unit="")
    torn = file.path.read_bytes()
    file.path.write_bytes(torn[: max(len(whole), len(torn) - cut)])
    assert len(guard(file, heads).entries()) == 2
    guard(file, heads).spend(key(2), ROUND[:1], unit="")
    assert file.path.read_bytes()[: len(whole)] == whole
    assert len(guard(file, heads).entries()) == 3


def test_a_ledger_that_was_truncated_or_put_back_from_a_backup(file: PrivacyLedgerFile) -> None:
    heads = Heads()
    guard(file, heads).spend(key(1), ROUND, unit="")
    backup = file.path.read_bytes()
    guard(file, heads).spend(key(2), ROUND, unit="")
    file.path.write_bytes(backup)
    with pytest.raises(IntegrityError, match="ends with entry 2, but the round journal knows entry 4"):
        guard(file, heads).check(ROUND, unit="")
    file.path.unlink()
    with pytest.raises(IntegrityError, match="ends with entry 0"):
        guard(file, heads).spend(key(3), ROUND, unit="")
    assert not file.path.exists()


def test_a_ledger_that_was_edited(file: PrivacyLedgerFile) -> None:
    heads = Heads()
    guard(file, heads).spend(key(1), ROUND, unit="")
    file.path.write_bytes(file.path.read_bytes().replace(b'"round":1', b'"round":2'))
    with pytest.raises(IntegrityError, match=f"{file.path} line 1"):
        guard(file, heads).check(ROUND, unit="")


def test_a_ledger_that_others_could_read_is_refused(file: PrivacyLedgerFile) -> None:
    guard(file, Heads()).spend(key(1), ROUND, unit="")
    file.path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="0644"):
        file.entries()


def test_a_full_disk_names_the_ledger(file: PrivacyLedgerFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lorica_security.host.files.write_at", full)
    heads = Heads()
    with pytest.raises(StorageError, match=r"ledger cannot be written \(No space left on device\)"):
        guard(file, heads).spend(key(1), ROUND, unit="")
    assert heads.head == Head()


def test_equal_mechanisms_are_one_of_more_steps() -> None:
    releases = [GaussianRelease(1.0, 0.1, 5), GaussianRelease(2.0), GaussianRelease(1.0, 0.1, 7), GaussianRelease(2.0)]
    assert merged(releases) == [GaussianRelease(1.0, 0.1, 12), GaussianRelease(2.0, 1.0, 2)]


def test_rounds_that_were_private_for_a_line_say_nothing_of_a_patient(file: PrivacyLedgerFile) -> None:
    heads = Heads()
    guard(file, heads).spend(key(1), ROUND, unit="")
    of_patients = guard(file, heads)
    of_patients.budget = replace(of_patients.budget, unit="patient")
    assert of_patients.spent() == math.inf
    with pytest.raises(PolicyRefusal, match="epsilon inf"):
        of_patients.check(ROUND, unit="")
    assert guard(file, heads).spent() < math.inf


def test_rounds_that_were_private_for_a_patient_count_for_lines_as_a_patient_replaced(file: PrivacyLedgerFile) -> None:
    heads, ample = Heads(), replace(BUDGET, epsilon=10.0)
    guard(file, heads, ample).spend(key(1), ROUND, unit="patient")
    of_patients, of_lines = guard(file, heads, ample), guard(file, heads, ample)
    of_patients.budget = replace(of_patients.budget, unit="patient")
    assert [entry.unit for entry in file.entries()] == ["patient"] * len(ROUND)
    assert (of_patients.counted().relation(), of_lines.counted().relation()) == ("add_or_remove_one", "replace_one")
    releases = [release for _, release in ROUND]
    for counting, relation in ((of_patients, "add_or_remove_one"), (of_lines, "replace_one")):
        spent = filtered_epsilon(
            releases, favoured=counting.counted().orders()[0], dp_delta=BUDGET.dp_delta, relation=relation
        )
        assert counting.spent() == spent < math.inf
        assert counting.counted().as_one_schedule() == epsilon_of(releases, dp_delta=BUDGET.dp_delta, relation=relation)
    assert of_lines.spent() > of_patients.spent()


def test_a_round_that_is_within_the_budget_for_a_patient_alone_says_what_to_write(file: PrivacyLedgerFile) -> None:
    """At rate 1, a line more turns its patient's gradient into any other: twice the shift."""
    release: list[Release] = [("gradients", GaussianRelease(4.0))]
    counting = guard(file, Heads(), Budget(epsilon=1.6, dp_delta=1e-5))
    counting.check(release, unit="")
    with pytest.raises(
        PolicyRefusal, match=r"replaces what its 'patient' adds.* set \[policy\] unit_field = 'patient'"
    ):
        counting.check(release, unit="patient")
    counting.budget = replace(counting.budget, unit="patient")
    counting.spend(key(1), release, unit="patient")
    assert counting.spent() < 1.6


def test_a_delta_of_a_whole_silo_counts_alike_for_patients_and_for_lines(file: PrivacyLedgerFile) -> None:
    heads = Heads()
    guard(file, heads).spend(key(1), [("delta", GaussianRelease(8.0))], unit="")
    of_patients = guard(file, heads)
    of_patients.budget = replace(of_patients.budget, unit="patient")
    assert of_patients.spent() == guard(file, heads).spent() < math.inf
