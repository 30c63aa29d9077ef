"""One budget for records that several silo folders of a machine train on: who finds whom, what is counted, and when
nothing is released."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lorica_security.audit.chain import Head
from lorica_security.errors import LoricaError, PolicyRefusal
from lorica_security.host.files import write_private
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.accounting import Budget, GaussianRelease
from lorica_security.privacy.ledger import Entry, head_of
from lorica_security.privacy.renyi_filter import favoured_order, filtered_epsilon
from silo_agent.edges.accounts import shared_budget
from silo_agent.edges.accounts.shared_budget import SharedBudget, sharing_of
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.service.privacy import BudgetSpent, NotShared, PrivacyGuard, SharedRecords
from silo_agent.service.told import BUDGET_SPENT, told
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import Example, SiloData
from silo_wire.canonical import digest_of
from silo_wire.messages import RoundKey
from silo_wire.plans.privacy import Release

ROUND: list[Release] = [("gradients", GaussianRelease(5.0)), ("loss_reduction", GaussianRelease(20.0))]
ONCE = [release for _, release in ROUND]
ORDER = favoured_order(ONCE, epsilon=3.0, dp_delta=1e-5)
PLAN = digest_of(b"plan")
SCHEMA = Schema("clinic", "test", ())


class Heads:
    head = Head()

    def ledger_head(self) -> Head:
        return self.head

    def record_ledger_head(self, head: Head) -> None:
        self.head = head


class NoReceipts:
    def newest(self) -> None:
        return None

    def keep(self, receipt: object) -> None:
        raise AssertionError("nobody countersigned")


def data_of(questions: Sequence[str], schema: Schema = SCHEMA, units: Sequence[str] = ()) -> SiloData:
    owners = units or [""] * len(questions)
    train = tuple(
        Example(f"q{number}", question, f"SELECT {question}", schema.db_id, unit)
        for number, (question, unit) in enumerate(zip(questions, owners, strict=True))
    )
    return SiloData(train=train, dev=(), test=(), schema=schema, database=None, bad_lines=())


class OneSilo:
    """A folder, its guard, and the registry that it counts in."""

    def __init__(self, root: Path, registry: Path, *, epsilon: float = 3.0, unit: str = "", clock: int = 1) -> None:
        self.folder, self.registry = SiloFolder(root), registry
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.ledger = PrivacyLedgerFile(self.folder.privacy_ledger)
        self.sharing = SharedBudget(registry, self.folder)
        self.guard = PrivacyGuard(
            ledger=self.ledger,
            heads=Heads(),
            receipts=NoReceipts(),
            budget=Budget(epsilon=epsilon, dp_delta=1e-5, unit=unit),
            clock=lambda: float(clock),
            where=str(self.ledger.path),
            sharing=self.sharing,
        )

    def trains_on(self, *questions: str, units: Sequence[str] = (), unit_field: str = "") -> "OneSilo":
        self.sharing.register(data_of(questions, units=units), unit_field)
        return self

    def spends(self, *rounds: int) -> None:
        for number in rounds:
            key = RoundKey(federation="north", plan=PLAN, round=number, attempt=1)
            self.guard.spend(key, ROUND, unit=self.guard.budget.unit)


def cost(rounds: int, order: int = ORDER) -> float:
    return filtered_epsilon(ONCE * rounds, favoured=order, dp_delta=1e-5)


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    folder = tmp_path / "registry"
    folder.mkdir(mode=0o700)
    return folder


def test_two_folders_with_the_same_records_have_one_budget(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one", "two")
    b = OneSilo(tmp_path / "b", registry).trains_on("two", "one")
    a.spends(1, 2)
    assert b.guard.spent() == a.guard.spent() == cost(2)
    b.spends(1, 2)
    assert b.guard.spent() == a.guard.spent() == cost(4)
    allowed = max(rounds for rounds in range(20) if cost(rounds) <= 3.0)
    a.spends(*range(3, allowed - 1))
    for silo in (a, b):
        with pytest.raises(
            BudgetSpent, match=r"by \d+ releases of other silo folders with some of the same"
        ) as refused:
            silo.spends(30)
        assert refused.value.rule == "max_epsilon"
    assert len(a.ledger.entries()) + len(b.ledger.entries()) == allowed * len(ROUND)
    assert a.guard.counted().as_one_schedule() < a.guard.spent()


def test_one_record_in_common_is_enough_and_none_is_not(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one", "two", "three")
    b = OneSilo(tmp_path / "b", registry).trains_on("four", "  ONE ")  # written otherwise
    c = OneSilo(tmp_path / "c", registry).trains_on("four", "five")
    d = OneSilo(tmp_path / "d", registry).trains_on("six")
    a.spends(1)
    assert [silo.guard.spent() for silo in (a, b, c, d)] == [cost(1), cost(1), 0.0, 0.0]
    c.spends(1)
    assert [silo.guard.spent() for silo in (a, b, c, d)] == [cost(1), cost(2), cost(1), 0.0]


def test_a_record_that_was_trained_on_once_counts_after_it_left_the_data(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    a.spends(1)
    OneSilo(tmp_path / "a", registry).trains_on("two")
    assert OneSilo(tmp_path / "b", registry).trains_on("one").guard.spent() == cost(1)


def test_a_patient_in_two_folders_is_shared_whatever_their_lines_are(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry, unit="patient")
    a.trains_on("one", "two", units=["ann", "bea"], unit_field="patient").spends(1)
    b = OneSilo(tmp_path / "b", registry, unit="patient")
    b.trains_on("three", units=["Ann"], unit_field="patient")
    assert b.guard.spent() == cost(1)
    by_line = OneSilo(tmp_path / "c", registry).trains_on("one")
    by_line.spends(1)
    assert a.guard.spent() == float("inf"), "what hides a line says nothing of a patient"


def test_a_copied_folder_is_found_and_what_both_have_counts_once(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    a.spends(1)
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copy = OneSilo(tmp_path / "copy", registry, clock=2).trains_on("one")
    assert copy.guard.spent() == a.guard.spent() == cost(1)
    copy.spends(2)
    a.spends(2)
    assert copy.guard.spent() == a.guard.spent() == cost(3)


def test_two_silos_whose_first_entries_are_the_same_count_both(tmp_path: Path, registry: Path) -> None:
    """Of one federation, plan and round, in the same second; without a nonce, as earlier releases wrote them."""
    silos = [OneSilo(tmp_path / name, registry).trains_on("one") for name in ("a", "b")]
    for silo in silos:
        silo.guard.sharing = NotShared()
        silo.spends(1)
        old: list[Entry] = []
        for entry in silo.ledger.entries():
            old.append(replace(entry, order=0, nonce="", previous=head_of(old).digest))
        write_private(silo.ledger.path, b"".join(entry.line() for entry in old))
        silo.guard = OneSilo(silo.folder.root, registry).guard
    assert silos[0].ledger.entries() == silos[1].ledger.entries()
    for silo in silos:
        silo.guard.sharing = silo.sharing
        silo.guard.admit((), unit="")
    assert [silo.guard.spent() for silo in silos] == [cost(2), cost(2)]


def test_a_folder_that_was_put_back_from_a_backup_has_spent_what_it_spent(tmp_path: Path, registry: Path) -> None:
    OneSilo(tmp_path / "a", registry).trains_on("one").spends(1)
    shutil.copytree(tmp_path / "a", tmp_path / "backup")
    OneSilo(tmp_path / "a", registry).trains_on("one").spends(2)
    shutil.rmtree(tmp_path / "a")
    shutil.copytree(tmp_path / "backup", tmp_path / "a")
    assert OneSilo(tmp_path / "a", registry).guard.spent() == cost(2)


def test_a_folder_that_counted_alone_brings_its_ledger_with_it(tmp_path: Path, registry: Path) -> None:
    """As one does that an earlier release wrote."""
    alone = OneSilo(tmp_path / "a", registry)
    alone.guard.sharing = NotShared()
    alone.spends(1)
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    b = OneSilo(tmp_path / "b", registry).trains_on("one")
    assert b.guard.spent() == 0.0
    a.guard.admit(ROUND, unit="")  # as soon as a plan is prepared, before any round
    assert b.guard.spent() == a.guard.spent() == cost(1)


def test_the_order_of_the_ledger_that_was_opened_first_is_that_of_all_who_share_its_records(
    tmp_path: Path, registry: Path
) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    a.spends(1)
    b = OneSilo(tmp_path / "b", registry, epsilon=9.0).trains_on("one")
    assert favoured_order(ONCE, epsilon=9.0, dp_delta=1e-5) != ORDER
    b.spends(1)
    assert [entry.order for entry in b.ledger.entries()] == [ORDER, 0]


def test_nothing_goes_beyond_any_order_where_ledgers_were_opened_apart(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    a.spends(1)
    b = OneSilo(tmp_path / "b", registry, epsilon=9.0).trains_on("two")
    b.spends(1, 2, 3, 4, 5)
    (other,) = {entry.order for entry in b.ledger.entries()} - {0, ORDER}
    b.trains_on("one")
    assert cost(6) != cost(6, other)
    assert a.guard.spent() == b.guard.spent() == max(cost(6), cost(6, other))


# ---- crashes, and two at once ---------------------------------------------------------------------------------------


def test_a_crash_between_the_registrys_entry_and_the_ledgers_wastes_it_and_forgets_nothing(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    b = OneSilo(tmp_path / "b", registry).trains_on("one")

    def killed(self: PrivacyLedgerFile, entries: Sequence[Entry]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(PrivacyLedgerFile, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            a.spends(1)
    assert a.ledger.entries() == ()
    again = OneSilo(tmp_path / "a", registry, clock=2).trains_on("one")
    assert again.guard.spent() == b.guard.spent() == cost(1)
    again.spends(1)
    assert again.guard.spent() == b.guard.spent() == cost(2)


@pytest.mark.parametrize("cut", [1, 40])
def test_an_entry_that_a_crash_tore_in_the_registry_was_never_released(
    tmp_path: Path, registry: Path, cut: int
) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    a.spends(1)
    (releases,) = registry.glob("*.releases")
    whole = releases.read_bytes()
    with releases.open("ab") as file:
        file.write(replace(a.ledger.entries()[0], round=7).line()[:-cut])
    assert a.guard.spent() == cost(1)
    a.spends(2)
    assert releases.read_bytes().startswith(whole)
    assert OneSilo(tmp_path / "b", registry).trains_on("one").guard.spent() == cost(2)


def test_who_looks_while_another_spends_waits_for_its_entry(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the entry of the one there is room for the other in nobody's budget."""
    limit = 1.15
    order = favoured_order(ONCE, epsilon=limit, dp_delta=1e-5)
    assert cost(1, order) < limit < cost(2, order)
    a = OneSilo(tmp_path / "a", registry, epsilon=limit).trains_on("one")
    b = OneSilo(tmp_path / "b", registry, epsilon=limit).trains_on("one")
    waits, refused = threading.Event(), []

    def spends() -> None:
        with pytest.raises(BudgetSpent) as error:
            b.spends(1)
        refused.append(error.value.rule)

    other = threading.Thread(target=spends)
    enter = a.sharing.enter

    def looked(entries: Sequence[Entry]) -> None:
        other.start()
        assert waits.wait(30)
        enter(entries)

    monkeypatch.setattr(a.sharing, "enter", looked)
    monkeypatch.setattr(shared_budget, "pause", waits.set)
    a.spends(1)
    other.join(30)
    assert refused == ["max_epsilon"]
    assert b.ledger.entries() == ()


SPENDER = """
import sys
from pathlib import Path
from silo_agent.service.privacy import BudgetSpent
from tests.unit.test_agent_shared_budget import OneSilo
silo = OneSilo(Path(sys.argv[1]), Path(sys.argv[2])).trains_on("one")
print("ready", flush=True)
sys.stdin.readline()
try:
    silo.spends(*range(1, 50))
except BudgetSpent:
    print(len(silo.ledger.entries()))
"""


def test_two_agents_at_once_spend_the_budget_once(tmp_path: Path, registry: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SPENDER, str(tmp_path / name), str(registry)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("a", "b")
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    made = [process.stdin.write("go\n") and process.stdin.flush() for process in processes if process.stdin]
    assert len(made) == 2
    entries = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(entries) == len(ROUND) * max(rounds for rounds in range(20) if cost(rounds) <= 3.0)


# ---- where it cannot be told ----------------------------------------------------------------------------------------


def test_the_same_records_on_another_machine_are_not_found(tmp_path: Path, registry: Path) -> None:
    """Which ops/docs/privacy.md says; a copy of a folder that counted here is noticed there all the same."""
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    a.spends(1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    assert OneSilo(tmp_path / "b", elsewhere).trains_on("one").guard.spent() == 0.0
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    copy = OneSilo(tmp_path / "copy", elsewhere)
    for call in (copy.guard.spent, lambda: copy.trains_on("one"), lambda: copy.spends(2)):
        with pytest.raises(SharedRecords, match="not the registry that this silo counted in before") as refused:
            call()
        assert (refused.value.rule, str(registry) in str(refused.value)) == ("shared_records", True)


@pytest.mark.parametrize(
    "harm", ["gone", "emptied", "begun-anew", "open", "key-gone", "key-cut", "records-cut", "edited", "key-open"]
)
def test_a_registry_that_cannot_be_trusted_ends_all_release(tmp_path: Path, registry: Path, harm: str) -> None:
    OneSilo(tmp_path / "b", registry).trains_on("one").spends(1)
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    (releases,) = registry.glob("*.releases")
    match harm:
        case "gone":
            shutil.rmtree(registry)
        case "emptied":
            shutil.rmtree(registry)
            registry.mkdir(mode=0o700)
        case "begun-anew":
            shutil.rmtree(registry)
            registry.mkdir(mode=0o700)
            OneSilo(tmp_path / "c", registry).trains_on("two").spends(1)
        case "open":
            registry.chmod(0o755)
        case "key-gone":
            (registry / "key").unlink()
        case "key-cut":
            (registry / "key").write_bytes(b"short")
        case "key-open":
            (registry / "key").chmod(0o644)
        case "records-cut":
            for path in registry.glob("*.records"):
                path.write_bytes(path.read_bytes()[:-1])
        case "edited":
            releases.write_bytes(releases.read_bytes().replace(b'"round":1', b'"round":2'))
    for call in (a.guard.spent, lambda: a.guard.check(ROUND, unit=""), lambda: a.spends(1)):
        with pytest.raises(SharedRecords) as refused:
            call()
        assert told(refused.value, private=True, masked=False) == BUDGET_SPENT, "nothing of this machine is told"
    assert a.ledger.entries() == ()


def test_a_ledger_that_is_broken_is_told_of_as_that(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    a.spends(1)
    a.ledger.path.write_bytes(a.ledger.path.read_bytes().replace(b'"round":1', b'"round":2'))
    with pytest.raises(LoricaError, match="ledger line 1") as broken:
        a.spends(2)
    assert not isinstance(broken.value, PolicyRefusal)


def test_a_silo_spends_nothing_before_the_registry_knows_its_records(tmp_path: Path, registry: Path) -> None:
    with pytest.raises(SharedRecords, match="does not know yet which records"):
        OneSilo(tmp_path / "a", registry).spends(1)


# ---- which registry, and what is in it ------------------------------------------------------------------------------


def test_the_machines_registry_is_found_without_a_word_where_it_is_there(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = OneSilo(tmp_path / "a", registry).folder
    monkeypatch.setattr(shared_budget, "MACHINE_WIDE", tmp_path / "machine")
    assert isinstance(sharing_of(folder, ""), NotShared)
    (tmp_path / "machine").mkdir(mode=0o700)
    assert sharing_of(folder, "").shown == str(tmp_path / "machine")
    assert sharing_of(folder, str(registry)).shown == str(registry)
    assert isinstance(sharing_of(folder, "none"), NotShared)


def test_a_silo_that_counted_in_a_registry_looks_for_it_until_its_people_say_none(
    tmp_path: Path, registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_budget, "MACHINE_WIDE", tmp_path / "machine")
    a = OneSilo(tmp_path / "a", registry).trains_on("one")
    shutil.rmtree(registry)
    with pytest.raises(SharedRecords, match=f"{registry} is not there"):
        sharing_of(a.folder, "").others(())
    assert sharing_of(a.folder, "none").others(()) == ()


def test_the_registry_holds_keyed_digests_alone(tmp_path: Path, registry: Path) -> None:
    a = OneSilo(tmp_path / "a", registry).trains_on("mr smith", units=["ann"], unit_field="patient")
    a.spends(1)
    contents = {path.name: path.read_bytes() for path in registry.iterdir()}
    assert all(path.stat().st_mode & 0o077 == 0 for path in registry.iterdir())
    assert not any(word in content for content in contents.values() for word in (b"smith", b"ann\x00", b"SELECT"))
    (records,) = (content for name, content in contents.items() if name.endswith(".records"))
    assert len(records) == 2 * 16
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    OneSilo(tmp_path / "b", other).trains_on("mr smith", units=["ann"], unit_field="patient")
    (elsewhere,) = (path.read_bytes() for path in other.glob("*.records"))
    digests = [{content[at : at + 16] for at in (0, 16)} for content in (records, elsewhere)]
    assert digests[0].isdisjoint(digests[1]), "without the key nobody can tell whether it is the same record"
