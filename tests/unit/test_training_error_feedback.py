"""Updates in bfloat16 and int8: what travels, what is kept of it, and that nothing is lost, doubled or trusted that should not
be."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support import int8_by_hand
from support.tiny_t5 import bundle_of, random_model, silo_data
from transformers import T5ForConditionalGeneration

from lorica_security.errors import IntegrityError, StorageError
from silo_agent.rounds.update import BLOCK_ELEMENTS, TrainingDiverged
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.model import bind, layout_of, vector_blocks
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.update.client_update import Feedback, WrittenUpdate, write_update
from silo_agent.training.update.residual import Residuals
from silo_wire.canonical import Digest
from silo_wire.manifest import Dtype, Layout, Manifest, manifest_of
from tests.support.checkpointed_training import killed

Vector = NDArray[np.float32]
PLAN, OTHER_PLAN = Digest("aa" * 32), Digest("bb" * 32)


def several_blocks() -> T5ForConditionalGeneration:
    """Two whole blocks and a short one."""
    model = random_model(d_ff=2200)
    assert 2 * BLOCK_ELEMENTS < layout_of(model).parameters < 3 * BLOCK_ELEMENTS
    return model


@dataclass
class Silo:
    """A model, its round model on disk, and what the last updates left; `train` stands in for training."""

    folder: Path
    model: T5ForConditionalGeneration = field(default_factory=several_blocks)
    dtype: Dtype = "bfloat16"
    plan: Digest = PLAN
    notices: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters = bind(self.model, layout_of(self.model))
        self.layout: Layout = layout_of(self.model)
        self.round_model = self.vector()
        self.path = self.folder / "round-model"
        self.path.write_bytes(self.round_model.tobytes())
        self.manifest: Manifest = manifest_of(self.layout, [self.round_model.tobytes()])

    def vector(self) -> Vector:
        return np.frombuffer(b"".join(vector_blocks(self.parameters)), dtype="<f4")

    def train(self, delta: Vector) -> Vector:
        """Let the local model be round model + delta; the delta as float32 has it, which is what counts."""
        local = torch.from_numpy(self.round_model + delta)
        with torch.no_grad():
            for _, tensor, part in self.parameters.beside(local.numpy(), 0):
                tensor.copy_(torch.from_numpy(part))
        return local.numpy() - self.round_model

    def update(self, included: Digest | None = None, *, into: str = "update", most: float = math.inf) -> WrittenUpdate:
        residuals = Residuals(
            folder=self.folder,
            plan=self.plan,
            layout=self.layout,
            notice=lambda event, detail: self.notices.append((event, detail)),
        )
        return write_update(
            self.folder / into,
            self.layout.as_type(self.dtype),
            parameters=self.parameters,
            round_model=VectorReader(self.path, self.manifest, self.layout, None),
            feedback=Feedback(residuals=residuals, included=included),
            most=most,
        )

    def travelled(self, update: WrittenUpdate, name: str = "update") -> Vector:
        """What the coordinator makes of the update's file."""
        raw = (self.folder / name).read_bytes()
        layout = self.layout.as_type(self.dtype)
        assert update.manifest == manifest_of(layout, [raw])
        if self.dtype == "float32":
            return np.frombuffer(raw, dtype="<f4")
        if self.dtype == "int8":
            return int8_by_hand.read(raw)
        return torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).float().numpy()

    def rounded(self, values: Vector) -> Vector:
        """What of `values` travels, by hand."""
        if self.dtype == "int8":
            return int8_by_hand.read(int8_by_hand.written(values))
        return rounded(values)

    def residual(self, update: WrittenUpdate) -> Vector:
        return np.fromfile(self.residual_file(update), dtype="<f4", count=self.layout.parameters)

    def residual_file(self, update: WrittenUpdate) -> Path:
        return self.folder / f"{self.plan[:32]}-{update.manifest.digest}.residual"

    def residual_files(self) -> set[Path]:
        return {path for path in self.folder.iterdir() if "residual" in path.name}


@pytest.fixture(params=["bfloat16", "int8"])
def silo(tmp_path: Path, request: pytest.FixtureRequest) -> Silo:
    return Silo(tmp_path, dtype=request.param)


def deltas(silo: Silo, seed: int, scale: float = 1e-3) -> Vector:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(silo.layout.parameters, generator=generator).numpy()


def rounded(values: Vector) -> Vector:
    return torch.from_numpy(values.copy()).to(torch.bfloat16).float().numpy()


# ---- what travels ---------------------------------------------------------------------------------------------------


def test_a_float32_update_is_the_delta_bit_for_bit_and_leaves_no_residual(tmp_path: Path) -> None:
    silo = Silo(tmp_path, dtype="float32")
    delta = silo.train(deltas(silo, 1))
    update = silo.update()
    assert np.array_equal(silo.travelled(update), delta)
    assert update.norm == pytest.approx(float(np.linalg.norm(delta.astype(np.float64))), rel=1e-6)
    assert silo.residual_files() == set()
    assert (tmp_path / "update").stat().st_mode & 0o777 == 0o600


def test_after_an_update_that_is_scaled_down_nothing_is_made_up_for(silo: Silo) -> None:
    """What rounding cut off an update ten million times too long is longer than all that follow: it would go with the
    next one, and past the bound."""
    most = 1.0
    silo.train(deltas(silo, 1, scale=1e4))
    overshot = silo.update(most=most)
    assert overshot.norm > most
    assert not silo.residual_file(overshot).exists()
    delta = silo.train(deltas(silo, 2))
    update = silo.update(overshot.manifest.digest, most=most)
    assert update.norm <= most
    assert np.array_equal(silo.travelled(update), silo.rounded(delta))
    assert silo.residual_file(update).exists(), "of an update within the bound it is kept as ever"


def test_an_update_is_the_rounded_delta_and_the_rest_is_kept_privately(silo: Silo) -> None:
    delta = silo.train(deltas(silo, 1))
    update = silo.update()
    assert np.array_equal(silo.travelled(update), silo.rounded(delta))
    assert np.array_equal(silo.residual(update), delta - silo.rounded(delta))
    assert silo.residual_files() == {silo.residual_file(update)}
    assert silo.residual_file(update).stat().st_mode & 0o777 == 0o600
    assert silo.notices == []


def test_the_norm_is_of_what_travels_and_not_of_what_was_rounded(silo: Silo) -> None:
    """The coordinator measures that one: an update that rounding lifts above the bound is scaled down there."""
    silo.train(np.where(np.arange(silo.layout.parameters) % 2, 1.0047, 0.3).astype(np.float32))
    update = silo.update()
    travelled = float(np.linalg.norm(silo.travelled(update).astype(np.float64)))
    assert update.norm == pytest.approx(travelled, rel=1e-5)
    assert not silo.residual_file(silo.update(most=travelled * (1 - 1e-4))).exists()


def test_the_residual_of_an_update_that_counted_goes_into_the_next(silo: Silo) -> None:
    first = silo.train(deltas(silo, 1))
    update = silo.update()
    second = silo.train(deltas(silo, 2))
    after = silo.update(update.manifest.digest)
    u = second + (first - silo.rounded(first))
    assert np.array_equal(silo.travelled(after), silo.rounded(u))
    assert np.array_equal(silo.residual(after), u - silo.rounded(u))


def test_a_file_that_was_longer_ends_where_the_update_does(silo: Silo) -> None:
    (silo.folder / "update").write_bytes(b"\xff" * (4 * silo.layout.parameters + 5))
    silo.train(deltas(silo, 1))
    silo.travelled(silo.update())


# ---- nothing is lost, nothing counts twice --------------------------------------------------------------------------


def test_what_travelled_and_the_last_residual_add_up_to_the_deltas(silo: Silo) -> None:
    made = np.zeros(silo.layout.parameters)
    sent = np.zeros(silo.layout.parameters)
    included = None
    for number in range(8):
        made += silo.train(deltas(silo, number))
        update = silo.update(included)
        sent += silo.travelled(update)
        included = update.manifest.digest
    left = silo.residual(update)
    # Each round rounds delta + residual to float32 once: half a unit in the last place of numbers below 0.01.
    assert np.abs(made - sent - left).max() < 8 * 2.0**-32
    assert np.abs(left).max() > 1e-6
    assert len(silo.residual_files()) == 2


def test_the_error_of_a_sum_stays_bounded_with_feedback_and_grows_without(silo: Silo) -> None:
    """A delta whose numbers are rounded the same way, 12 times: in int8 all but the largest of each block."""
    alike = np.full(silo.layout.parameters, 1.00390625e-3, dtype=np.float32)
    half = 2.0**-18  # of bfloat16's last place there
    if silo.dtype == "int8":
        half = 1.00390625e-3 / 254
        alike[np.arange(len(alike)) % 1024 > 0] = 0.6 * half
    delta = silo.train(alike)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for feedback, seen in errors.items():
        total, made, included = np.zeros(silo.layout.parameters), np.zeros(silo.layout.parameters), None
        for _ in range(12):
            silo.train(delta)
            update = silo.update(included)
            total += silo.travelled(update)
            made += delta
            seen.append(float(np.linalg.norm(total - made)))
            included = update.manifest.digest if feedback else None
    unit = float(np.linalg.norm(np.full(silo.layout.parameters, half)))
    assert max(errors[True]) <= 1.01 * unit
    assert errors[False][-1] == pytest.approx(12 * errors[False][0], rel=1e-3)
    assert errors[False][-1] > 4 * max(errors[True])


def test_an_update_that_did_not_count_takes_its_residual_with_it(silo: Silo) -> None:
    """An attempt that is abandoned and tried again begins with the same residual and ends with the same bytes."""
    silo.train(deltas(silo, 1))
    counted = silo.update()
    silo.train(deltas(silo, 2))
    abandoned = silo.update(counted.manifest.digest)
    bytes_of_abandoned = (silo.folder / "update").read_bytes()
    again = silo.update(counted.manifest.digest)
    assert again.manifest == abandoned.manifest
    assert (silo.folder / "update").read_bytes() == bytes_of_abandoned
    silo.train(deltas(silo, 3))
    third = silo.update(counted.manifest.digest)
    assert silo.residual_files() == {silo.residual_file(counted), silo.residual_file(third)}
    assert silo.notices == []


def test_an_update_that_is_of_no_model_yet_begins_with_nothing(silo: Silo) -> None:
    silo.train(deltas(silo, 1))
    silo.update()
    delta = silo.train(deltas(silo, 2))
    update = silo.update(None)
    assert np.array_equal(silo.travelled(update), silo.rounded(delta))
    assert silo.residual_files() == {silo.residual_file(update)}


# ---- residuals that cannot be trusted -------------------------------------------------------------------------------


def test_a_damaged_block_counts_as_zero_and_the_others_count(silo: Silo) -> None:
    first = silo.train(deltas(silo, 1))
    update = silo.update()
    with silo.residual_file(update).open("r+b") as file:
        file.seek(4 * BLOCK_ELEMENTS + 17)
        file.write(b"\x01\x02\x03\x04")
    second = silo.train(deltas(silo, 2))
    left = first - silo.rounded(first)
    left[BLOCK_ELEMENTS : 2 * BLOCK_ELEMENTS] = 0
    assert np.array_equal(silo.travelled(silo.update(update.manifest.digest)), silo.rounded(second + left))
    ((event, detail),) = silo.notices
    assert event == "residual-lost"
    assert "1 of its 3 blocks are damaged" in detail


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def change_the_table(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        file.write(b"\0")


def take_away(path: Path) -> None:
    path.unlink()


def as_after_a_power_cut(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("harm", [shorten, lengthen, change_the_table, take_away, as_after_a_power_cut])
def test_a_residual_that_is_not_whole_counts_as_zero_and_is_told(silo: Silo, harm: Callable[[Path], None]) -> None:
    silo.train(deltas(silo, 1))
    update = silo.update()
    harm(silo.residual_file(update))
    second = silo.train(deltas(silo, 2))
    assert np.array_equal(silo.travelled(silo.update(update.manifest.digest)), silo.rounded(second))
    ((event, detail),) = silo.notices
    assert event == "residual-lost"
    assert str(silo.residual_file(update)) in detail


@pytest.mark.parametrize("renamed_to", ["plan", "update"])
def test_the_residual_of_another_plan_or_update_is_not_taken(silo: Silo, renamed_to: str) -> None:
    silo.train(deltas(silo, 1))
    update = silo.update()
    file, included = silo.residual_file(update), update.manifest.digest
    if renamed_to == "plan":
        silo.plan = OTHER_PLAN
    else:
        included = Digest("cc" * 32)
    file.rename(silo.folder / f"{silo.plan[:32]}-{included}.residual")
    second = silo.train(deltas(silo, 2))
    assert np.array_equal(silo.travelled(silo.update(included)), silo.rounded(second))
    assert [event for event, _ in silo.notices] == ["residual-lost"]


def test_a_residual_that_cannot_be_written_keeps_no_update_back(silo: Silo) -> None:
    (silo.folder / "new.residual.part").mkdir()
    delta = silo.train(deltas(silo, 1))
    update = silo.update()
    assert np.array_equal(silo.travelled(update), silo.rounded(delta))
    ((event, detail),) = silo.notices
    assert event == "residual-not-written"
    assert "new.residual.part cannot be written" in detail


# ---- what must not leave --------------------------------------------------------------------------------------------


def test_a_value_that_the_type_cannot_hold_is_refused_and_leaves_no_file(silo: Silo) -> None:
    delta = np.zeros(silo.layout.parameters, dtype=np.float32)
    delta[5] = 3.4e38
    silo.train(delta)
    with pytest.raises(TrainingDiverged, match=f"{silo.dtype} cannot hold"):
        silo.update()
    assert not (silo.folder / "update").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_delta_that_is_not_finite_never_leaves(tmp_path: Path, value: float, dtype: Dtype) -> None:
    silo = Silo(tmp_path, dtype=dtype)
    delta = np.zeros(silo.layout.parameters, dtype=np.float32)
    delta[-3] = value
    silo.train(delta)
    with pytest.raises(
        TrainingDiverged, match=r"tensor encoder\.final_layer_norm\.weight has values that are not finite"
    ):
        silo.update()
    assert not (tmp_path / "update").exists()


def test_a_round_model_that_changed_while_it_was_trained_on_makes_no_update(silo: Silo) -> None:
    silo.train(deltas(silo, 1))
    with silo.path.open("r+b") as file:
        file.seek(4 * silo.layout.parameters - 4)
        file.write(b"\0\0\0\0")
    with pytest.raises(IntegrityError, match="chunk 2 does not have the digest"):
        silo.update()
    assert not (silo.folder / "update").exists()


def test_an_update_that_cannot_be_written_is_named(silo: Silo) -> None:
    with pytest.raises(StorageError, match="absent/update cannot be written"):
        silo.update(into="absent/update")


# ---- kill -9 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "number"),
    [("pwrite", 1), ("pwrite", 3), ("pwrite", 6), ("ftruncate", 1), ("fsync", 1), ("ftruncate", 2), ("replace", 1)],
)
def test_after_a_kill_at_any_instant_the_same_bytes_are_made(silo: Silo, function: str, number: int) -> None:
    silo.train(deltas(silo, 1))
    counted = silo.update().manifest.digest
    silo.train(deltas(silo, 2))
    older = silo.update(counted)
    silo.train(deltas(silo, 3))
    killed(lambda: silo.update(counted), function, number)
    assert len(silo.residual_files()) <= 2
    update = silo.update(counted)
    after_a_kill = (silo.folder / "update").read_bytes(), silo.residual(update).tobytes()
    undisturbed = silo.update(counted)
    assert undisturbed.manifest == update.manifest != older.manifest
    assert ((silo.folder / "update").read_bytes(), silo.residual(undisturbed).tobytes()) == after_a_kill
    assert len(silo.residual_files()) == 2
    assert silo.notices == []


# ---- the trainer ----------------------------------------------------------------------------------------------------


def test_a_silo_trains_and_answers_in_bfloat16_as_its_plan_says(tmp_path: Path) -> None:
    """Models travel in bfloat16 and updates too: two rounds, FedProx on, the second with the first's residual."""
    pairs = [("how many people live in paris ?", "SELECT COUNT ( * ) FROM PEOPLE WHERE CITY = 'paris' ;")] * 3
    bundle = bundle_of(
        random_model(),
        training={"epochs": 3, "batch_size": 2, "dropout": 0.0, "fedprox_mu": 0.1, "max_output_tokens": 12},
        wire={"model": "bfloat16", "update": "bfloat16"},
    )
    trainer = SiloTrainer(bundle, silo_data(pairs, pairs), "clinic", DeviceSettings(device="cpu", threads=1))
    model = rounded(np.frombuffer(b"".join(vector_blocks(bind(random_model(), bundle.layout))), dtype="<f4"))
    made, sent, included = np.zeros(len(model)), np.zeros(len(model)), None
    notices: list[str] = []
    for number in (1, 2):
        path = tmp_path / f"model-{number}"
        path.write_bytes(torch.from_numpy(model).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
        manifest = manifest_of(bundle.model_layout, [path.read_bytes()])
        before = trainer.evaluate(model_path=path, model=manifest)
        update = trainer.train(
            round_number=number,
            model_path=path,
            model=manifest,
            update_path=tmp_path / "update",
            included_update=included,
            on_notice=lambda event, detail: notices.append(event),
        )
        update.manifest.check_layout(bundle.update_layout)
        assert update.manifest == manifest_of(bundle.update_layout, [(tmp_path / "update").read_bytes()])
        received = torch.frombuffer(bytearray((tmp_path / "update").read_bytes()), dtype=torch.bfloat16).float().numpy()
        local = np.frombuffer(b"".join(vector_blocks(trainer._model.parameters)), dtype="<f4")
        made += local - model
        sent += received
        model = rounded(model + received)
        included = update.manifest.digest
    (left,) = tmp_path.glob(f"*-{included}.residual")
    assert np.abs(made - sent - np.fromfile(left, dtype="<f4", count=len(model))).max() < 1e-8
    path.write_bytes(torch.from_numpy(model).to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    after = trainer.evaluate(model_path=path, model=manifest_of(bundle.model_layout, [path.read_bytes()]))
    assert after.loss_per_token < before.loss_per_token
    assert notices == []
