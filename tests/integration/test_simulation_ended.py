"""How a simulation ends before its plan does: it says what stands in its way, waits for nothing that cannot come, and
touches nobody else's folder."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lorica.cli import main as lorica
from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.simulation import going_on
from lorica.simulation.forecast.dry_run import dry_run
from lorica.simulation.run import silos_in, simulate
from lorica.simulation.simulated import Simulated
from lorica_coordinator.cli import main as coordinator
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import compile_plan, create_plan
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import ConfigurationError, StateError, StorageError
from silo_agent.training.silo_trainer import SiloTrainer
from tests.support.command_line import run_command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SILOS = ("ants", "bees", "crabs")
EXAMPLES = 8
VALUES = {
    "schedule.rounds": 1,
    "schedule.min_silos": 2,
    "evaluation.every": 1,
    "evaluation.initial": False,
    "evaluation.max_examples": 2,
    "evaluation.execution": False,
    "training.epochs": 1,
    "training.max_output_tokens": 8,
    "training.schema_in_input": False,
}

PRIVATE = {
    "privacy.level": "record",
    "privacy.steps": 2,
    "privacy.nominal_records": EXAMPLES,
    "privacy.expected_batch_size": 2,
    "training.dropout": 0.0,
    "evaluation.every": 0,
    "evaluation.last": False,
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three silos with the same few examples."""
    folder = tmp_path_factory.mktemp("silos")
    write_silo(folder / SILOS[0], CLINIC, seed=3)
    for name in ("train", "dev"):
        file = folder / SILOS[0] / f"{name}.jsonl"
        keep_first(file, EXAMPLES)
    for other in SILOS[1:]:
        shutil.copytree(folder / SILOS[0], folder / other)
    return folder


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`first`, `second` and, of another federation, `south`."""
    folder = tmp_path_factory.mktemp("plans")
    for name, federation in (("first", "north"), ("second", "north"), ("south", "south")):
        new_plan(folder, name, federation)
    return folder


def new_plan(folder: Path, name: str, federation: str = "north", **values: Any) -> Path:
    source = SizedModel("micro", None, None)
    create_plan(folder, name=name, federation=federation, source=source, overrides={**VALUES, **values})
    return folder / name


def simulated(plan: Path, silos: Path, out: Path, **more: Any) -> Simulated:
    return simulate(plan, silos_in(silos), out, device="cpu", threads=1, **more)


def only(silos: Path, folder: Path, names: tuple[str, ...]) -> Path:
    for name in names:
        shutil.copytree(silos / name, folder / name)
    return folder


def test_what_was_begun_with_one_plan_goes_on_with_no_other(plans: Path, three: Path, tmp_path: Path) -> None:
    two, out = only(three, tmp_path / "two", SILOS[:2]), tmp_path / "out"
    done = simulated(plans / "first", two, out)
    with pytest.raises(StateError, match=rf"out was begun with plan first \({done.plan}\), this is second .*--out"):
        simulated(plans / "second", two, out)
    with pytest.raises(StateError, match=r"was begun with a plan of federation north, this one is of south: .*--out"):
        simulated(plans / "south", two, out)
    assert simulated(plans / "first", two, out).rows == done.rows, "nothing of that has touched it"


def test_what_was_begun_among_some_silos_goes_on_among_no_others(plans: Path, three: Path, tmp_path: Path) -> None:
    """One that is gone would be waited for, by a clock that stands still; one more would be in some rounds alone."""
    two, out = only(three, tmp_path / "two", SILOS[:2]), tmp_path / "out"
    plan = new_plan(tmp_path / "plans", "long", **{"schedule.rounds": 1000})

    def cut(row: RoundRow) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulated(plan, two, out, on_round=cut)
    with pytest.raises(StateError, match=r"out was begun with bees among its silos: put the folder back, or .*--out"):
        simulated(plan, only(three, tmp_path / "one", SILOS[:1]), out)
    with pytest.raises(StateError, match="out was begun without crabs: choose another --out"):
        simulated(plan, three, out)


def test_what_was_begun_with_some_data_goes_on_with_no_other(three: Path, tmp_path: Path) -> None:
    """What came out would be neither the model of these data nor of those."""
    two, out = only(three, tmp_path / "two", SILOS[:2]), tmp_path / "out"
    plan = new_plan(tmp_path / "plans", "short", **{"schedule.rounds": 2})

    def cut(row: RoundRow) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulated(plan, two, out, on_round=cut)
    train = two / SILOS[1] / "train.jsonl"
    before = train.read_bytes()
    train.write_bytes(before.splitlines(keepends=True)[0])
    with pytest.raises(StateError, match=r"out was begun with other data of bees: put the data back, or .*--out"):
        simulated(plan, two, out)
    train.write_bytes(before)
    assert [row.round for row in simulated(plan, two, out).rows] == [1, 2]


def test_data_may_be_corrected_where_no_round_has_begun(plans: Path, three: Path, tmp_path: Path) -> None:
    silos, out = only(three, tmp_path / "silos", SILOS[:1]), tmp_path / "out"
    dev = silos / SILOS[0] / "dev.jsonl"
    dev.write_bytes(dev.read_bytes().splitlines(keepends=True)[0])
    with pytest.raises(StateError, match="min_silos = 2 and 1 silos are enrolled"):
        simulated(plans / "first", silos, out)
    shutil.rmtree(silos / SILOS[0])
    assert len(simulated(plans / "first", only(three, silos, SILOS), out).rows) == 1


def test_silos_may_be_added_where_no_round_has_begun(plans: Path, three: Path, tmp_path: Path) -> None:
    one, out = only(three, tmp_path / "one", SILOS[:1]), tmp_path / "out"
    with pytest.raises(StateError, match="min_silos = 2 and 1 silos are enrolled"):
        simulated(plans / "first", one, out)
    (row,) = simulated(plans / "first", three, out).rows
    assert [silo.silo for silo in row.silos] == list(SILOS)


def test_the_coordinator_of_a_federation_is_left_alone(
    plans: Path, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    made = run_command(coordinator, "init", tmp_path / "out" / "coordinator", "--federation", "north", "--no-plan")
    assert made.code == 0, made.err
    before = sorted((tmp_path / "out").rglob("*"))
    with pytest.raises(StateError, match=r"coordinator is a coordinator that silos reach over the network: .*--out"):
        simulated(plans / "first", three, tmp_path / "out")
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_models_that_a_kill_left_behind_do_not_pile_up(plans: Path, three: Path, tmp_path: Path) -> None:
    left = tmp_path / "out" / "models" / f"{'ab' * 32}.model"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"a round's model of which a part was written")
    done = simulated(plans / "first", three, tmp_path / "out")
    assert {path.stem for path in left.parent.iterdir()} == {
        compile_plan(plans / "first").plan.model.initial,
        done.final,
    }


@pytest.mark.parametrize("after", ["keys", "shelf"])
def test_a_kill_while_the_coordinator_is_made_leaves_what_goes_on(
    plans: Path, three: Path, tmp_path: Path, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """No handler of errors sees it, as none sees a kill."""

    def die(*arguments: Any, **more: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        where = (KeyStore, "create") if after == "keys" else (shutil, "copytree")
        really = getattr(*where)

        def half_way(*arguments: Any, **more: Any) -> None:
            really(*arguments, **more)
            die()

        patch.setattr(*where, half_way)
        patch.setattr(shutil, "rmtree", lambda *arguments, **more: None)  # who is killed does not tidy up
        with pytest.raises(Killed):
            simulated(plans / "first", three, tmp_path / "out")
    assert len(simulated(plans / "first", three, tmp_path / "out").rows) == 1


def test_a_folder_of_something_else_is_not_written_over(plans: Path, three: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "coordinator").mkdir(parents=True)
    (tmp_path / "out" / "coordinator" / "notes").touch()
    with pytest.raises(ConfigurationError, match="out/coordinator is not an empty folder"):
        simulated(plans / "first", three, tmp_path / "out")


def test_a_silo_that_cannot_take_part_says_why_though_a_federation_would_not_be_told(
    three: Path, tmp_path: Path
) -> None:
    plan = new_plan(tmp_path / "plans", "private", **PRIVATE)
    silos = only(three, tmp_path / "silos", SILOS)
    (silos / "bees" / "schema.json").write_text("{")
    with pytest.raises(StateError, match=r"silo bees does not take part: the work failed here.*bees/schema\.json"):
        simulated(plan, silos, tmp_path / "out")


def test_a_round_that_comes_to_nothing_again_and_again_ends_the_simulation(three: Path, tmp_path: Path) -> None:
    """One step of such a weight decay leaves deltas within float32's range, and ten times their mean outside it."""
    far = {
        "training.learning_rate": 10.0,
        "training.weight_decay": 5e36,
        "training.batch_size": EXAMPLES,
        "aggregation.server_optimizer": "sgd",
        "aggregation.server_learning_rate": 10.0,
        "aggregation.max_delta_norm": 0.0,
        "schedule.min_silos": 3,
    }
    plan = new_plan(tmp_path / "plans", "far", **far)
    heard: list[RoundRow] = []
    with pytest.raises(StateError, match=r"round 1 has come to nothing \d+ times, and would again: .*--out"):
        simulated(plan, three, tmp_path / "out", on_round=heard.append)
    assert {row.outcome for row in heard} == {"abandoned"}


def test_a_coordinator_that_cannot_go_on_ends_the_simulation_which_goes_on_later(
    plans: Path, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any, **more: Any) -> None:
        raise StorageError("models cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ModelStore, "add", full)
        patch.setattr(going_on, "PATIENCE_S", 0.0)
        with pytest.raises(StateError, match=r"the coordinator cannot go on: models cannot be written: No space left"):
            simulated(plans / "first", three, tmp_path / "out")
    (row,) = simulated(plans / "first", three, tmp_path / "out").rows
    assert (row.attempt, row.outcome) == (1, "applied")


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize("out", ["file", "file/below"])
def test_an_out_that_is_no_folder_is_named(
    plans: Path, three: Path, tmp_path: Path, out: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    done = run_command(lorica, "simulate", plans / "first", "--silos", three, "--out", tmp_path / out, *more)
    done.is_refusal(StorageError, out, "choose another --out")


def test_a_dry_run_tells_of_the_others_where_one_silos_training_comes_to_nothing(three: Path, tmp_path: Path) -> None:
    """With this weight decay such a learning rate takes every parameter out of float32's range within a round."""
    common = {"training.learning_rate": 1e-7, "training.weight_decay": 1e6, "training.batch_size": 1}
    plan = new_plan(tmp_path / "plans", "steep", **{**common, "training.overrides.bees.learning_rate": 10.0})
    done = dry_run(plan, silos_in(three), tmp_path / "out", device="cpu", threads=1)
    assert [silo.silo for silo in done.estimate.silos] == ["ants", "crabs"]
    (problem,) = done.problems
    assert problem.startswith("silo bees does not take part: ")
    assert "learning_rate" in problem


def test_a_dry_run_names_the_silo_that_memory_is_too_small_for(
    plans: Path, three: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = SiloTrainer.train

    def train(self: SiloTrainer, **work: Any) -> Any:
        if self._silo == "bees":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return really(self, **work)

    monkeypatch.setattr(SiloTrainer, "train", train)
    done = dry_run(plans / "first", silos_in(three), tmp_path / "out", device="cpu", threads=1)
    (problem,) = done.problems
    assert problem.startswith("silo bees does not take part: this machine has too little memory")
