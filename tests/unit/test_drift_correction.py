"""SCAFFOLD without a byte more: against an oracle that keeps every control variate, what a silo keeps on disk, and the
plans that it goes with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import nn

from lorica.simulation.forecast.estimate import SiloCounts, SiloTimes, estimate
from lorica_security.errors import IntegrityError, LoricaError, StateError, StorageError
from lorica_security.identifiers import SiloName
from silo_agent.commands.plan_review import unusual
from silo_agent.edges.check.machine_checks import FREE_BYTES, check_disk, disk_need
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.device import DeviceSettings
from silo_agent.training.local_trainer import accumulate_gradient
from silo_agent.training.model.model import bind, layout_of, vector_blocks
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.silo_trainer import LocalUpdate, SiloTrainer
from silo_agent.training.update.control_state import ControlStates
from silo_wire.canonical import Digest, digest_of
from silo_wire.manifest import Layout, Manifest, TensorSpec, manifest_of
from silo_wire.plans.plan import Plan, PlanBundle
from tests.support.checkpointed_training import killed
from tests.support.tiny_t5 import CORPUS, bundle_of, random_model, silo_data

Vector = NDArray[np.float32]
Wide = NDArray[np.float64]

RATE, STEPS, SERVER_RATE, CLIP = 0.3, 3, 0.75, 1.0
TRAINING: dict[str, Any] = {
    "drift_correction": "scaffold",
    "optimizer": "sgd",
    "steps": STEPS,
    "learning_rate": RATE,
    "max_grad_norm": CLIP,
    "batch_size": 8,
    "dropout": 0.0,
    "schema_in_input": False,
}
AGGREGATION: dict[str, Any] = {
    "weighting": "equal",
    "server_learning_rate": SERVER_RATE,
    "momentum": 0.0,
    "max_delta_norm": 0.0,
}
SILOS: Mapping[str, list[tuple[str, str]]] = {
    "bank": [(CORPUS[0], CORPUS[3])],
    "clinic": [(CORPUS[1], CORPUS[4]), (CORPUS[1], CORPUS[5])],
    "insurer": [(CORPUS[2], CORPUS[5]), (CORPUS[0], CORPUS[4]), (CORPUS[2], CORPUS[4])],
}
"""Each goes over all that it has in one step, so that no order of data is to be repeated."""


def bundle(**training: Any) -> PlanBundle:
    return bundle_of(random_model(dropout_rate=0.0), training={**TRAINING, **training}, aggregation=AGGREGATION)


@dataclass
class Silo:
    """An agent's own trainer in a folder of its own."""

    name: str
    folder: Path
    plan: PlanBundle
    newest: Digest | None = None
    trainer: SiloTrainer = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.trainer = SiloTrainer(
            self.plan, silo_data(SILOS[self.name]), self.name, DeviceSettings(device="cpu", threads=1)
        )

    def train(self, model: Vector, *, included: Digest | None, number: int = 1, **how: Any) -> LocalUpdate:
        manifest = self.write(model)
        return self.trainer.train(
            round_number=number,
            model_path=self.folder / "model",
            model=manifest,
            update_path=self.folder / "update",
            included_update=included,
            **how,
        )

    def write(self, model: Vector) -> Manifest:
        (self.folder / "model").write_bytes(model.tobytes())
        return manifest_of(self.plan.layout, [model.tobytes()])

    def delta(self) -> Vector:
        return np.fromfile(self.folder / "update", dtype="<f4")

    def states(self) -> list[Path]:
        return sorted(self.folder.glob("*.control*"))


def initial() -> Vector:
    model = random_model(dropout_rate=0.0)
    return np.frombuffer(b"".join(vector_blocks(bind(model, layout_of(model)))), dtype="<f4")


# ---- the oracle -----------------------------------------------------------------------------------------------------


class Oracle:
    """Algorithm 1 of Karimireddy et al. 2020 with option II, in float64, of which each silo keeps c_i and the server
    c."""

    def __init__(self, silos: list[Silo]) -> None:
        self.model = random_model(dropout_rate=0.0).double().train()
        self.parameters = bind(self.model, layout_of(self.model.float())).tensors
        self.model.double()
        self.silos = silos
        self.own: dict[str, Wide] = {}
        self.server: Wide = np.zeros(sum(parameter.numel() for parameter in self.parameters))

    def gradient(self, silo: Silo, at: Wide) -> Wide:
        self.put(at)
        examples = silo.trainer.encoded("train")
        section = silo.plan.plan.training
        every = [list(range(len(examples)))]
        accumulate_gradient(self.model, examples, every, section, torch.device("cpu"), lambda: False)
        nn.utils.clip_grad_norm_(self.parameters, CLIP)
        found = [np.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1).numpy() for p in self.parameters]
        return np.concatenate(found)

    def put(self, values: Wide) -> None:
        begin = 0
        with torch.no_grad():
            for parameter in self.parameters:
                end = begin + parameter.numel()
                parameter.copy_(torch.from_numpy(values[begin:end].copy()).view(parameter.shape))
                parameter.grad = None
                begin = end

    def round(self, x: Wide, *, corrected: bool = True) -> Wide:
        deltas, changes = [], []
        for silo in self.silos:
            own, y = self.own.get(silo.name, np.zeros_like(x)), x.copy()
            for _ in range(STEPS):
                y -= RATE * (self.gradient(silo, y) + (self.server - own if corrected else 0.0))
            after = own - self.server + (x - y) / (STEPS * RATE)
            deltas.append(y - x)
            changes.append(after - own)
            self.own[silo.name] = after
        self.server = self.server + np.mean(changes, axis=0)
        return x + SERVER_RATE * np.mean(deltas, axis=0)


def test_rounds_are_those_of_an_oracle_that_keeps_every_control_variate(tmp_path: Path) -> None:
    plan = bundle()
    silos = [Silo(name, tmp_path / name, plan) for name in SILOS]
    oracle, plain = Oracle(silos), Oracle(silos)
    x, expected, without = initial(), initial().astype(np.float64), initial().astype(np.float64)
    for number in range(1, 5):
        deltas = []
        for silo in silos:
            silo.newest = silo.train(x, included=silo.newest, number=number).manifest.digest
            deltas.append(silo.delta())
        x = (x + SERVER_RATE * np.mean(deltas, axis=0, dtype=np.float64)).astype(np.float32)
        expected, without = oracle.round(expected), plain.round(without, corrected=False)
        off = float(np.linalg.norm(x - expected))
        moved = float(np.linalg.norm(expected - initial()))
        assert off < 2e-5 * moved, f"round {number}: {off:g} of {moved:g}"
    assert float(np.linalg.norm(without - expected)) > 1e-2 * moved, "the correction would not show"


def test_a_first_round_is_that_of_plain_sgd_to_the_last_bit(tmp_path: Path) -> None:
    corrected, plain = (
        Silo("bank", tmp_path / "a", bundle()),
        Silo("bank", tmp_path / "b", bundle(drift_correction="none")),
    )
    first = corrected.train(initial(), included=None)
    assert first.manifest.digest == plain.train(initial(), included=None).manifest.digest
    assert (len(corrected.states()), plain.states()) == (1, [])
    again = corrected.train(initial(), included=first.manifest.digest)
    assert again.manifest.digest != first.manifest.digest


# ---- what is kept ---------------------------------------------------------------------------------------------------

LAYOUT = Layout("float32", (TensorSpec("a", (2,)), TensorSpec("b", (1, 1))))
FIRST, SECOND, THIRD = (digest_of(text) for text in (b"first", b"second", b"third"))


def reader(folder: Path, name: str, *values: float) -> VectorReader:
    raw = np.array(values, dtype="<f4").tobytes()
    (folder / name).write_bytes(raw)
    return VectorReader(folder / name, manifest_of(LAYOUT, [raw]), LAYOUT, None)


def keep(states: ControlStates, update: Digest, included: Digest | None = None) -> None:
    """The delta (2, 0, -4) of the model (1, 2, 4)."""
    folder = states.folder
    delta, model = reader(folder, "d", 2, 0, -4), reader(folder, "x", 1, 2, 4)
    states.keep(update, delta=delta, included=included, round_model=model)


def kept(folder: Path, **changes: Any) -> ControlStates:
    values = {"folder": folder, "plan": digest_of(b"plan"), "layout": LAYOUT, "server_rate": 0.5, "work": 0.25}
    return ControlStates(**{**values, **changes})


def corrections(states: ControlStates, included: Digest | None, model: VectorReader, *names: str) -> list[list[float]]:
    found = states.correction(included, model, names=names or ("a", "b"), device=torch.device("cpu"))
    return [] if found is None else [tensor.reshape(-1).tolist() for tensor in found]


def test_states_and_corrections_by_hand(tmp_path: Path) -> None:
    """b = 1/2, s a = 1/4. From x = (1, 2, 4) a delta of (2, 0, -4) makes p = (2, 2, 2). The server comes to (1, 1, 1):
    h = 8 (p - x) = (8, 8, 8). Then a delta of (2, 4, 6) makes p = (3, 4, 5), at (3, 3, 3) h = (0, 8, 16)."""
    states = kept(tmp_path)
    assert corrections(states, None, reader(tmp_path, "x", 1, 2, 4)) == []
    states.keep(FIRST, delta=reader(tmp_path, "d", 2, 0, -4), included=None, round_model=reader(tmp_path, "x", 1, 2, 4))
    assert corrections(states, FIRST, reader(tmp_path, "x", 1, 1, 1)) == [[8.0, 8.0], [8.0]]
    states.keep(
        SECOND, delta=reader(tmp_path, "d", 2, 4, 6), included=FIRST, round_model=reader(tmp_path, "x", 1, 1, 1)
    )
    assert corrections(states, SECOND, reader(tmp_path, "x", 3, 3, 3)) == [[0.0, 8.0], [16.0]]
    assert corrections(states, SECOND, reader(tmp_path, "x", 3, 3, 3), "b") == [[16.0]], "what the round trains"


def test_the_state_that_was_begun_with_stays_until_the_next_and_no_older_one(tmp_path: Path) -> None:
    states = kept(tmp_path)
    keep(states, FIRST)
    keep(states, SECOND, FIRST)
    assert {states.of(FIRST), states.of(SECOND)} == set(tmp_path.glob("*.control*"))
    assert states.of(SECOND).stat().st_mode & 0o777 == 0o600
    keep(states, THIRD, SECOND)
    assert {states.of(SECOND), states.of(THIRD)} == set(tmp_path.glob("*.control*"))
    keep(states, FIRST)
    assert {states.of(FIRST)} == set(tmp_path.glob("*.control*")), "begun anew"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def change_the_digest(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


HARM: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "digest": change_the_digest,
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:6]),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_damaged_state_ends_the_work_and_makes_no_other(harm: Callable[[Path], object], tmp_path: Path) -> None:
    states = kept(tmp_path)
    keep(states, FIRST)
    harm(states.of(FIRST))
    with pytest.raises(IntegrityError, match="is damaged: this round is declined, and every silo begins"):
        corrections(states, FIRST, reader(tmp_path, "x", 1, 1, 1))
    with pytest.raises(IntegrityError, match="is damaged"):
        keep(states, SECOND, FIRST)
    assert list(tmp_path.glob("*.control*")) == [states.of(FIRST)]


@pytest.mark.parametrize(
    "changed", [{"plan": digest_of(b"another")}, {"layout": Layout("float32", (TensorSpec("a", (3,)),))}]
)
def test_attack_the_state_of_another_plan_or_update_under_this_ones_name(changed: Any, tmp_path: Path) -> None:
    states = kept(tmp_path)
    keep(kept(tmp_path, **changed), FIRST)
    kept(tmp_path, **changed).of(FIRST).replace(states.of(FIRST))
    with pytest.raises(IntegrityError, match="is damaged"):
        corrections(states, FIRST, reader(tmp_path, "x", 1, 1, 1))
    keep(states, FIRST)
    states.of(FIRST).replace(states.of(SECOND))
    with pytest.raises(IntegrityError, match="is damaged"):
        corrections(states, SECOND, reader(tmp_path, "x", 1, 1, 1))


def test_a_state_that_is_lost_is_named_and_no_zero_is_taken_for_it(tmp_path: Path) -> None:
    silo, steps = Silo("clinic", tmp_path / "clinic", bundle()), list[float]()
    with pytest.raises(StateError, match=r"control state .* is not here \(No such file.*this round is declined"):
        silo.train(initial(), included=FIRST, on_progress=lambda fraction, loss: steps.append(fraction))
    assert (silo.states(), steps) == ([], []), "it is said before hours of training"


def test_a_state_that_cannot_be_written_keeps_the_update_back(tmp_path: Path) -> None:
    silo = Silo("clinic", tmp_path / "clinic", bundle())
    (silo.folder / "new.control.part").mkdir()
    with pytest.raises(StorageError, match=r"cannot be written .*free some space"):
        silo.train(initial(), included=None)


# ---- kills ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "number"), [("pwrite", 1), ("fsync", 1), ("fsync", 3), ("replace", 1)])
def test_after_a_kill_at_any_instant_the_same_bytes_are_made(function: str, number: int, tmp_path: Path) -> None:
    """fsync: of the update, of its folder, of the state."""
    silo = Silo("clinic", tmp_path / "clinic", bundle())
    counted = silo.train(initial(), included=None).manifest.digest
    moved = initial() + np.float32(0.5) * silo.delta()
    update = silo.train(moved, included=counted, number=2)
    undisturbed = silo.delta().tobytes(), [path.read_bytes() for path in silo.states()]
    (silo.folder / f"{silo.plan.plan.digest[:32]}-{update.manifest.digest}.control").unlink()
    killed(lambda: silo.train(moved, included=counted, number=2), function, number)
    again = Silo("clinic", tmp_path / "clinic", bundle())
    again.train(moved, included=counted, number=2)
    assert (again.delta().tobytes(), [path.read_bytes() for path in again.states()]) == undisturbed


def test_training_goes_on_after_a_kill_with_the_correction_that_it_had_and_with_no_other(tmp_path: Path) -> None:
    silo = Silo("insurer", tmp_path / "insurer", bundle())
    counted = silo.train(initial(), included=None).manifest.digest
    checkpoint = tmp_path / "checkpoint"

    def cut_off() -> None:
        with pytest.raises(TrainingStopped):
            silo.train(initial(), included=counted, number=2, checkpoint_path=checkpoint, should_stop=checkpoint.exists)

    def done(included: Digest | None) -> tuple[int, bytes]:
        """Optimizer steps that were made, and the update."""
        steps: list[float] = []
        silo.train(
            initial(), included=included, number=2, checkpoint_path=checkpoint,
            on_progress=lambda fraction, loss: steps.append(fraction),
        )  # fmt: skip
        return len(steps), silo.delta().tobytes()

    whole = done(counted)
    checkpoint.unlink()
    cut_off()
    assert done(counted) == (STEPS - 1, whole[1])
    checkpoint.unlink()
    cut_off()
    anew = done(None)
    assert anew[0] == STEPS, "an epoch of another training was taken"
    assert anew[1] != whole[1]


# ---- plans ----------------------------------------------------------------------------------------------------------


def plan_of(**sections: dict[str, Any]) -> Plan:
    values = bundle().plan.model_dump(mode="json")
    for section, changes in sections.items():
        values[section] |= changes
    return Plan.model_validate(values)


MASKED = {"secure_aggregation": True, "max_weight": 1.0}
REFUSED: list[tuple[str, dict[str, dict[str, Any]]]] = [
    (r'\[training\] optimizer = "adamw" does not go with .*set it to "sgd"', {"training": {"optimizer": "adamw"}}),
    (r"\[training\] steps = 0 .*set it to how many", {"training": {"steps": 0}}),
    (r'learning_rate_schedule = "linear" .*"constant"', {"training": {"learning_rate_schedule": "linear"}}),
    (r"fedprox_mu = 0\.1 .*set it to 0", {"training": {"fedprox_mu": 0.1}}),
    (r"overrides\.bank\] learning_rate = 0\.1 .*0\.3", {"training": {"overrides": {"bank": {"learning_rate": 0.1}}}}),
    (r'weighting = "size" .*"equal"', {"aggregation": {"weighting": "size"}}),
    (r'reducer = "median" .*"mean"', {"aggregation": {"reducer": "median"}, "schedule": {"min_silos": 3}}),
    (r'\[adapters\] train = "reproject" .*"both", "b" or "alternate"', {"adapters": {"rank": 2, "train": "reproject"}}),
    (r'server_optimizer = "adam" .*"sgd"', {"aggregation": {"server_optimizer": "adam"}}),
    (r"momentum = 0\.9 .*set it to 0", {"aggregation": {"momentum": 0.9}}),
    (r"server_rate_at_end = 0\.5 .*set it to 1", {"aggregation": {"server_rate_at_end": 0.5}}),
    (r'step_length = "fedexp" .*"fixed"', {"aggregation": {"step_length": "fedexp"}}),
    (r"max_delta_norm = 1000 .*set it to 0", {"aggregation": {"max_delta_norm": 1000.0}}),
    (r'\[wire\] model = "bfloat16" .*"float32"', {"wire": {"model": "bfloat16"}}),
    (r'\[wire\] update = "bfloat16" .*"float32"', {"wire": {"update": "bfloat16"}}),
    (r'\[wire\] update = "int8" .*for which it rounds more away .*"float32"', {"wire": {"update": "int8"}}),
    (r"\[schedule\] cohort_size = 3 .*lacks a silo.*set it to 0", {"schedule": {"cohort_size": 3}}),
    (r"secure_aggregation = true .*one silo's delta: set it to false", {"aggregation": MASKED}),
    (r'\[privacy\] level = "record" .*noise of one round.*"none"', {"privacy": {"level": "record"}}),
    (r'\[privacy\] level = "silo" .*"none"', {"privacy": {"level": "silo"}}),
]


@pytest.mark.parametrize(("says", "changes"), REFUSED, ids=lambda it: None if isinstance(it, str) else str(it)[:60])
def test_a_plan_that_breaks_what_is_needed_is_refused_by_name(says: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        plan_of(**changes)
    assert 'or drift_correction to "none"' in str(caught.value)


def test_what_a_plan_may_have_beside_it() -> None:
    plan = plan_of(
        training={"weight_decay": 0.01, "overrides": {"bank": {"batch_size": 4, "learning_rate": RATE}}},
        aggregation={"max_weight": 2.0, "max_weight_share": 1.0},
    )
    assert plan.corrects_drift
    assert Plan.from_json(plan.to_json()) == plan
    without = plan_of(training={"drift_correction": "none"})
    assert not without.corrects_drift
    assert b"drift_correction" not in without.to_json(), "the digests of plans without it stay"


def test_what_people_hear_before_they_approve_it_and_how_much_room_it_takes(tmp_path: Path) -> None:
    corrected, plain = bundle(), bundle(drift_correction="none")
    (line,) = set(unusual(corrected)) - set(unusual(plain))
    assert line.startswith('[training] drift_correction = "scaffold": this silo keeps the sum of its deltas on disk')
    folder = SiloFolder(tmp_path)
    vector = corrected.layout.total_bytes
    need = disk_need(folder, 2, corrected)
    assert check_disk(folder, need, 1 << 40).endswith("for control states, which are as private as records")
    assert "control" not in check_disk(folder, disk_need(folder, 2, plain), 1 << 40)
    least = FREE_BYTES + vector * (2 + 1 + 3)
    check_disk(folder, need, least)
    with pytest.raises(LoricaError, match="are needed"):
        check_disk(folder, need, least - 1)


def test_the_forecast_counts_one_vector_more_at_a_silo() -> None:
    counts = SiloCounts(silo=SiloName("bank"), train=8, dev=0, inputs_cut=0, targets_cut=0)
    times = {counts.silo: SiloTimes(step_s=1.0, beside_steps_s=0.0, example_s=0.0, peak_bytes=0)}
    held = [
        estimate(it, [counts], times, {}).silos[0].memory.optimizer
        for it in (bundle(), bundle(drift_correction="none"))
    ]
    assert held == [bundle().layout.total_bytes, 0]
