"""What an operator is told of a plan with silo-level privacy: its forecast, its refusal, what was released."""

import json
from pathlib import Path

import pytest

from lorica_coordinator import cli
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.server.audited import released
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.silo_level import most_parameters
from lorica_coordinator.service.unusable import BudgetSpent
from lorica_security.audit.entry import Event
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage
from lorica_security.on_disk.reading import read_log
from silo_wire.plans.plan import Plan
from silo_wire.plans.sizes import size_named
from tests.support.command_line import Done, run_command
from tests.support.coordinator import initialise
from tests.support.coordinator_edges import round_key

SET = (
    "aggregation.max_weight=100.0",
    "aggregation.max_delta_norm=0.5",
    "evaluation.every=0",
    "evaluation.initial=false",
    "evaluation.last=false",
    "privacy.level=silo",
)


@pytest.fixture
def folder(tmp_path: Path) -> CoordinatorFolder:
    return initialise(tmp_path / "coordinator")


def new(folder: CoordinatorFolder, name: str, *more: str) -> Done:
    settings = [word for assignment in (*SET, *more) for word in ("--set", assignment)]
    return run_command(cli.main, "plan", "new", name, "--size", "micro", "--dir", folder.root, *settings)


@pytest.mark.parametrize("more", [(), ("aggregation.secure_aggregation=true", "privacy.target_epsilon=900.0")])
def test_the_first_refusal_has_all_that_such_a_plan_takes(folder: CoordinatorFolder, more: tuple[str, ...]) -> None:
    words = ["plan", "new", "all", "--size", "micro", "--dir", folder.root]
    for one in ("privacy.level=silo", *more):
        words += ["--set", one]
    refused = run_command(cli.main, *words)
    refused.is_refusal(ConfigurationError, "[evaluation] every = 5", "all that it takes: --set evaluation.every=0")
    wanted = refused.err.rpartition("all that it takes: ")[2].split()
    done = run_command(cli.main, *words, *wanted)
    assert done.code == 0, done.err


def test_what_else_is_wrong_is_said_alone(folder: CoordinatorFolder) -> None:
    words = ("--set", "privacy.level=silo", "--set", "schedule.rounds=0")
    refused = run_command(cli.main, "plan", "new", "all", "--size", "micro", "--dir", folder.root, *words)
    refused.is_refusal(ConfigurationError, "rounds")
    assert "all that it takes" not in refused.err


@pytest.mark.parametrize("size", ["micro", "mini"])
def test_no_model_of_a_size_has_more_parameters_than_are_said(folder: CoordinatorFolder, size: str) -> None:
    done = run_command(cli.main, "plan", "new", size, "--size", size, "--dir", folder.root)
    assert done.code == 0, done.err
    parameters = Coordinator.load(folder).shelf.compile(size).plan.model.parameters
    assert parameters <= most_parameters(size_named(size)) < 1.1 * parameters


def test_a_plan_that_drowns_is_refused_and_leaves_nothing(folder: CoordinatorFolder) -> None:
    refused = new(folder, "drowned")
    refused.is_refusal(ConfigurationError, "times as long as 100 silos", "max_noise_to_signal is 1", "would do")
    assert not (Coordinator.load(folder).shelf.plans / "drowned").exists()


def test_the_forecast_is_told_and_what_was_released_is_added_up(
    folder: CoordinatorFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = new(folder, "noised", "privacy.max_noise_to_signal=1e6")
    assert told.code == 0, told.err
    for words in ("privacy: epsilon", "of 8 at dp_delta 1e-05", "the coordinator makes the noise", "noise to signal"):
        assert words in told.out
    nothing = run_command(cli.main, "privacy", "--dir", folder.root)
    assert nothing.out == "no sum was released with noise of the coordinator's\n"
    coordinator = Coordinator.load(folder)
    plan = coordinator.shelf.compile("noised").plan
    for number in (1, 2):
        coordinator.releases.enter(round_key(plan.digest, number), b"sum %d" % number, plan.privacy)
    shown = run_command(cli.main, "privacy", "--dir", folder.root)
    assert "plan noised" in shown.out
    assert "2 sums of deltas" in shown.out
    (row,) = json.loads(run_command(cli.main, "privacy", "--json", "--dir", folder.root).out)
    assert row["releases"] == 2
    assert row["epsilon"] == pytest.approx(plan.privacy.epsilon(rounds=2, weighted=True))
    audited = ReleaseLedger(coordinator.settings.state_folder / "privacy", tell=released(coordinator.audit()))
    for _ in range(2):  # the same sum again is no other release
        audited.enter(round_key(plan.digest, 3), b"sum 3", plan.privacy)
    (told,) = read_log(folder.audit).of(Event.SUM_RELEASED)
    assert (told.number("round"), told.number("ledger_entry")) == (3, 3)
    assert told.text("ledger_digest") == coordinator.releases.kept.entries()[-1].digest

    def reads_none(raw: bytes) -> Plan:
        raise MalformedMessage("plan: unknown key of_old")

    monkeypatch.setattr(Plan, "from_json", staticmethod(reads_none))
    left = run_command(cli.main, "privacy", "--dir", folder.root)
    assert left.out == f"plan {plan.digest[:16]}: 3 sums of deltas; the release that made it tells what they come to\n"
    (row,) = json.loads(run_command(cli.main, "privacy", "--json", "--dir", folder.root).out)
    assert (row["digest"], row["releases"], row["epsilon"]) == (plan.digest, 3, None)


def test_a_restored_coordinator_releases_nothing_more_of_a_plan_whose_releases_it_may_have_forgotten(
    folder: CoordinatorFolder, tmp_path: Path
) -> None:
    assert new(folder, "noised", "privacy.max_noise_to_signal=1e6").code == 0
    coordinator = Coordinator.load(folder)
    coordinator.open_store().close()
    plan = coordinator.shelf.compile("noised").plan
    audited = ReleaseLedger(coordinator.settings.state_folder / "privacy", tell=released(coordinator.audit()))
    assert run_command(cli.main, "backup", tmp_path / "early", "--plain", "--dir", folder.root).code == 0
    audited.noise_key(b"")
    audited.enter(round_key(plan.digest, 1), b"sum 1", plan.privacy)
    assert run_command(cli.main, "backup", tmp_path / "b", "--plain", "--dir", folder.root).code == 0
    audited.enter(round_key(plan.digest, 2), b"sum 2", plan.privacy)
    ledger = coordinator.releases.kept.path

    for target, given in (("lost", ("--without-log",)), ("log", ("--log", folder.audit))):
        done = run_command(cli.main, "restore", tmp_path / "b", tmp_path / target, *given)
        assert done.code == 0, done.err
        assert f"closed: plan {plan.digest[:16]}" in done.out
        releases = Coordinator.load(CoordinatorFolder(tmp_path / target)).releases
        with pytest.raises(BudgetSpent, match="came from a backup"):
            releases.enter(round_key(plan.digest, 2), b"sum 2, of others", plan.privacy)
        assert len(releases.kept.entries()) == 1

    done = run_command(
        cli.main, "restore", tmp_path / "b", tmp_path / "whole", "--log", folder.audit, "--ledger", ledger
    )
    assert done.code == 0, done.err
    restored = Coordinator.load(CoordinatorFolder(tmp_path / "whole"))
    releases = restored.releases_told(restored.audit())
    assert [entry.round for entry in releases.kept.entries()] == [1, 2]
    assert releases.enter(round_key(plan.digest, 3), b"sum 3", plan.privacy)
    assert releases.noise_key(b"x") == coordinator.releases.noise_key(b"x"), "one secret: no sum has two noises"

    # From the same backup again, after a restoration that closed the plan: the ledger of that time does not open it
    # again.
    for target, of, closes in (("again", "whole", False), ("doubt", "lost", True)):
        newest = CoordinatorFolder(tmp_path / of)
        given = ("--log", newest.audit, "--ledger", Coordinator.load(newest).releases.kept.path)
        done = run_command(cli.main, "restore", tmp_path / "b", tmp_path / target, *given)
        assert done.code == 0, done.err
        closed = Coordinator.load(CoordinatorFolder(tmp_path / target)).releases.closed()
        assert closed == ({plan.digest} if closes else set())

    for backup, given, words in (("early", ledger, "before the first sum"), ("b", tmp_path / "gone", "is missing")):
        done = run_command(
            cli.main, "restore", tmp_path / backup, tmp_path / "no", "--log", folder.audit, "--ledger", given
        )
        done.is_refusal(ConfigurationError, words)
    alone = run_command(cli.main, "restore", tmp_path / "b", tmp_path / "alone", "--without-log", "--ledger", ledger)
    alone.is_refusal(ConfigurationError, "--ledger needs the newer audit log")
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(lines[0])
    stale = run_command(
        cli.main, "restore", tmp_path / "b", tmp_path / "stale", "--log", folder.audit, "--ledger", ledger
    )
    assert stale.code == 0, stale.err
    assert Coordinator.load(CoordinatorFolder(tmp_path / "stale")).releases.closed() == {plan.digest}, (
        "the log knows of a sum that this ledger has not"
    )
    ledger.write_bytes(b"")
    cut = run_command(cli.main, "restore", tmp_path / "b", tmp_path / "cut", "--log", folder.audit, "--ledger", ledger)
    cut.is_refusal(IntegrityError, "it was truncated")
    assert not (tmp_path / "cut").exists()
