"""`silo-agent privacy` and the budget's line in `silo-agent status`, as people type them."""

import json
from pathlib import Path

import pytest

from lorica_security.errors import EXIT_CODES, IntegrityError, PolicyRefusal
from lorica_security.host.files import write_private
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.accounting import Budget, GaussianRelease
from lorica_security.privacy.ledger import Entry, head_of
from silo_agent.cli import main
from silo_agent.edges.accounts.privacy_ledger import LedgerReceiptFile, guard_of
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import store_credentials
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.messages import RoundKey
from tests.support.command_line import Done, run_command
from tests.support.federation_peer import FEDERATION, SILO, FederationPeer
from tests.unit.test_agent_private_rounds import BUNDLE, PLAN
from tests.unit.test_agent_service import NET

WHO = NET.credentials("127.0.0.1:1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SiloFolder:
    monkeypatch.delenv("LORICA_SILO_DIR", raising=False)
    folder = SiloFolder(tmp_path / "silo")
    store_credentials(folder, WHO)
    folder.make()
    PlanStore(folder.plans).save(BUNDLE)
    return folder


def command(folder: SiloFolder, *arguments: str) -> Done:
    return run_command(main, *arguments, "--dir", folder.root)


def spend(folder: SiloFolder, rounds: int) -> LedgerReceipt:
    """So many rounds, and the coordinator's receipt for them."""
    journal = RoundJournal(folder.journal, updates=folder.updates, silo=SILO)
    guard = guard_of(folder, WHO, SiloPolicy(rules=PolicyRules(), silo=SILO), journal)
    assert guard.budget == Budget(epsilon=10.0, dp_delta=1e-5)
    for number in range(1, rounds + 1):
        key = RoundKey(federation=FEDERATION, plan=PLAN, round=number, attempt=1)
        guard.spend(key, BUNDLE.plan.releases_of_round, unit="")
    receipt = FederationPeer(NET).receipt(head_of(guard.entries()))
    LedgerReceiptFile(folder.privacy_receipt, WHO).keep(receipt)
    journal.close()
    return receipt


def test_verify_shows_the_newest_receipt_and_checks_it_without_a_coordinator(folder: SiloFolder) -> None:
    nothing = command(folder, "privacy", "verify")
    assert nothing.code == 0
    assert "the ledger is whole: 0 entries" in nothing.out
    assert "countersigned by the coordinator: nothing yet" in nothing.out
    receipt = spend(folder, 2)
    whole = command(folder, "privacy", "verify")
    assert whole.code == 0, whole.err
    assert f"countersigned by the coordinator: entry 4, {receipt.newest.digest}; its signature is right" in whole.out
    assert receipt.signature.hex() in whole.out


def test_verify_finds_a_receipt_that_was_edited_and_a_ledger_that_is_behind_its_receipt(folder: SiloFolder) -> None:
    receipt = spend(folder, 2)
    whole = folder.privacy_ledger.read_bytes()
    journal = RoundJournal(folder.journal, updates=folder.updates, silo=SILO)
    journal.set_fact("ledger_head", f"0 {'0' * 64}")  # whoever cuts the ledger may have the journal, too
    journal.close()
    write_private(folder.privacy_ledger, b"".join(whole.splitlines(keepends=True)[:2]))
    command(folder, "privacy", "verify").is_refusal(
        IntegrityError, str(folder.privacy_ledger), "ends with entry 2", "the coordinator's receipt knows entry 4"
    )
    write_private(folder.privacy_receipt, receipt.to_json().replace(b'"sequence":4', b'"sequence":2'))
    command(folder, "privacy", "verify").is_refusal(IntegrityError, str(folder.privacy_receipt), "is not signed")


def test_forecast_ends_with_the_code_of_a_refusal_when_no_round_is_left(folder: SiloFolder) -> None:
    spend(folder, 1)
    left = command(folder, "privacy", "forecast")
    assert (left.code, left.err) == (0, "")
    assert "allows 3 of them" in left.out
    folder.settings.write_text("[policy]\nmax_epsilon = 0.7\n")
    for arguments in (("privacy", "forecast"), ("privacy", "forecast", "--json")):
        spent = command(folder, *arguments)
        assert spent.code == EXIT_CODES[PolicyRefusal] == 8
        assert "the privacy budget is spent" in spent.err
        assert "[policy] max_epsilon allows 0.7" in spent.err
    assert json.loads(spent.out)["rounds_left"] == 0


def test_forecast_counts_rounds_of_ones_own_noise_alone_as_well_once_noise_was_joint(folder: SiloFolder) -> None:
    """As the agent does, which takes no round beyond either."""
    rules = PolicyRules(max_epsilon_alone=10.0)
    journal = RoundJournal(folder.journal, updates=folder.updates, silo=SILO)
    joint = [("joint_gradients", GaussianRelease(40.0, makers=2))]
    key = RoundKey(federation=FEDERATION, plan="ab" * 32, round=1, attempt=1)
    guard_of(folder, WHO, SiloPolicy(rules=rules, silo=SILO), journal).spend(key, joint, unit="")
    journal.close()
    folder.settings.write_text("[policy]\nmax_epsilon_alone = 10.0\n")
    told = json.loads(command(folder, "privacy", "forecast", "--json").out)
    assert told["after_all_rounds"] < told["after_all_rounds_alone"] < 10
    folder.settings.write_text("[policy]\nmax_epsilon_alone = 0.5\n")
    spent = command(folder, "privacy", "forecast")
    assert spent.code == EXIT_CODES[PolicyRefusal]
    assert "max_epsilon_alone 0.5" in spent.err


def test_show_tells_what_holds_over_plans_and_what_is_a_forecast(folder: SiloFolder) -> None:
    spend(folder, 2)
    one_plan = command(folder, "privacy", "show").out
    assert "epsilon 1.34 of 10 is spent" in one_plan
    assert "exact, as one schedule that was fixed beforehand: epsilon 0.966" in one_plan
    journal = RoundJournal(folder.journal, updates=folder.updates, silo=SILO)
    guard = guard_of(folder, WHO, SiloPolicy(rules=PolicyRules(), silo=SILO), journal)
    guard.spend(
        RoundKey(federation=FEDERATION, plan="ab" * 32, round=1, attempt=1), BUNDLE.plan.releases_of_round, unit=""
    )
    order = guard.counted().orders()[0]
    journal.close()
    two_plans = command(folder, "privacy", "show").out
    assert "forecast, as one schedule that was fixed beforehand: epsilon 1.21; 2 plans are in it" in two_plans
    spent = json.loads(command(folder, "privacy", "show", "--json").out)["spent"]
    assert (spent["plans"], spent["favoured_order"], spent["releases_of_others"]) == (2, order, 0)
    assert spent["as_one_schedule"] < spent["epsilon"] == pytest.approx(1.6635, abs=1e-4)


@pytest.mark.parametrize("what", ["show", "verify", "forecast"])
def test_all_numbers_are_of_one_reading_of_the_ledger(
    folder: SiloFolder, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that is entered meanwhile is in all of them, or in none."""
    spend(folder, 2)
    readings, entries = [], PrivacyLedgerFile.entries

    def read(file: PrivacyLedgerFile) -> tuple[Entry, ...]:
        readings.append(file.path)
        return entries(file)

    monkeypatch.setattr(PrivacyLedgerFile, "entries", read)
    assert command(folder, "privacy", what).code == 0
    assert readings == [folder.privacy_ledger]


def test_status_shows_what_is_spent_of_what_is_allowed_in_one_line(folder: SiloFolder) -> None:
    assert "epsilon 0 of 10" in command(folder, "status").out
    spend(folder, 1)
    (line,) = [line for line in command(folder, "status").out.splitlines() if line.startswith("privacy budget")]
    assert line.split(maxsplit=2)[2] == "epsilon 0.929 of 10"
    assert json.loads(command(folder, "status", "--json").out)["privacy_budget"] == "epsilon 0.929 of 10"
    folder.privacy_ledger.unlink()
    broken = command(folder, "status")
    assert broken.code == 0
    assert "not to be spent" in broken.out
    assert "ends with entry 0, but the round journal knows entry 2" in broken.out
