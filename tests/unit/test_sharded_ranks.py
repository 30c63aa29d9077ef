"""Ranks that hold a part of the model each: half the bytes, the gradient of one process, and a whole update.

Ranks are forked processes here; tests/integration/test_killed_ranks.py has them as an agent starts them, and kills
them.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

from lorica_security.errors import IntegrityError, StateError, StorageError
from silo_agent.policy.rank_limits import rank_refusals
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.update import TrainingStopped
from silo_agent.service.refusals import RULES
from silo_agent.settings import Settings, TrainingSection
from silo_agent.training import local_trainer
from silo_agent.training.checkpoint import training_identity
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.device import DeviceSettings
from silo_agent.training.local_optimizer import local_optimizer
from silo_agent.training.model.model import BoundParameters, bind, layout_of, load_vector
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.ranks.ranks import ALONE, Alone, AnotherRankFailed, Ranks
from silo_agent.training.ranks.sharded_ranks import ShardedRanks
from silo_agent.training.silo_trainer import LocalUpdate, SiloTrainer
from silo_agent.training.update.client_update import Feedback, WrittenUpdate, write_update
from silo_agent.training.update.parts import part_of
from silo_agent.training.update.residual import Residuals
from silo_agent.training.update.spread import Spread
from silo_wire.canonical import digest_of
from silo_wire.manifest import Layout, manifest_of
from tests.support.forked_ranks import in_forked_ranks
from tests.support.rank_silo import PAIRS, SILO
from tests.support.tiny_t5 import bundle_of, random_model, silo_data, write_model
from tests.unit.test_training_private_trainer import examples_of
from tests.unit.test_training_ranks import PRIVATE, Round, unhurried

Floats = NDArray[np.float32]
CPU = torch.device("cpu")


class Watched:
    """A training of one process or a rank: of each step the gradient before it is clipped, as it is held here, and its
    norm; after a step the bytes of what is held."""

    def __init__(self, it: Round, ranks: Ranks) -> None:
        self.bytes = 0
        self.gradients: list[list[tuple[int, Floats]]] = []
        self.norms: list[float] = []
        self._trainer = SiloTrainer(
            it.bundle, silo_data(PAIRS), SILO, DeviceSettings(device="cpu", threads=1), ranks=ranks
        )
        self._optimizer: list[torch.optim.Optimizer] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_trainer, "local_optimizer", self._made)
            patch.setattr(nn.utils, "clip_grads_with_norm_", self._clipped)
            self._trainer.train(
                round_number=1,
                model_path=it.model,
                model=it.manifest,
                update_path=it.folder / "update",
                on_progress=self._look,
            )

    def _made(self, *arguments: Any) -> torch.optim.Optimizer:
        self._optimizer.append(local_optimizer(*arguments))
        return self._optimizer[-1]

    def _clipped(self, parameters: Sequence[nn.Parameter], most: float, norm: torch.Tensor) -> None:
        self.gradients.append(
            [
                (part.start, tensor.grad.numpy().reshape(-1).copy())
                for _, tensor, part in self._trainer._model.parameters.placed()
                if tensor.grad is not None
            ]
        )
        self.norms.append(float(norm))
        clip_grads_with_norm_(parameters, most, norm)

    def _look(self, fraction: float, loss: float) -> None:
        parameters = self._trainer._model.parameters
        held = [
            *chain.from_iterable(whole_or_part(it) for it in self._trainer._model.t5.parameters()),
            *chain.from_iterable((it, it.grad) for it in parameters.tensors),
            *chain.from_iterable(state.values() for state in self._optimizer[0].state.values()),
        ]
        storages = {it.untyped_storage().data_ptr(): it.untyped_storage() for it in held if it is not None}
        self.bytes = sum(storage.nbytes() for storage in storages.values())

    @property
    def told(self) -> tuple[int, list[float], list[list[tuple[int, Floats]]]]:
        return self.bytes, self.norms, self.gradients


def whole_or_part(parameter: Any) -> list[torch.Tensor | None]:
    """What FSDP2 itself holds of a parameter; a gradient that it kept would be counted twice."""
    if not hasattr(parameter, "to_local"):
        return [parameter, parameter.grad]
    return [parameter.to_local(), None if parameter.grad is None else parameter.grad.to_local()]


def flat(parts: Sequence[tuple[int, Floats]], elements: int) -> Floats:
    vector: Floats = np.full(elements, np.nan, dtype=np.float32)
    for begin, values in parts:
        assert np.isnan(vector[begin : begin + len(values)]).all(), "held twice"
        vector[begin : begin + len(values)] = values
    return vector


def off(these: Floats, others: Floats) -> float:
    """Relative to `others`; nan where one of them is."""
    return float(np.linalg.norm(these - others) / np.linalg.norm(others))


def test_two_ranks_hold_half_and_come_to_the_gradient_of_one_process(tmp_path: Path) -> None:
    """Also where one of them has no batch in a step. All shards are scaled down by the norm of all."""
    one, two = (Round(tmp_path / name, optimizer="adamw", max_grad_norm=0.1) for name in ("one", "two"))
    whole, norms, gradients = Watched(one, ALONE).told
    outcomes = in_forked_ranks(2, lambda ranks: Watched(two, ranks).told)
    elements = one.bundle.layout.parameters
    steps = [
        (flat(list(chain(*held)), elements), flat(expected, elements))
        for *held, expected in zip(*(outcome[2] for outcome in outcomes), gradients, strict=True)
    ]
    assert len(steps) == 3
    assert off(*steps[0]) < 3e-6
    # AdamW's first steps are signs, which rounding turns: further ones are of another model.
    assert max(off(*step) for step in steps) < 2e-2
    assert min(norms) > 0.1, "or nothing was scaled down"
    for held, own_norms, _ in outcomes:
        assert own_norms == pytest.approx(norms, rel=1e-3)
        assert held <= 0.55 * whole
    assert whole >= 4 * 4 * elements
    assert off(*(np.frombuffer(it.bytes(), dtype="<f4") for it in (two, one))) < 2e-2


def test_three_ranks_write_the_same_whole_update_each_time(tmp_path: Path) -> None:
    """With dropout, over a file of an earlier round that is longer; three ranks have parts of three lengths."""
    it = Round(tmp_path, optimizer="adamw", batch_size=8, dropout=0.2, gradient_checkpointing=True)

    def again(ranks: ShardedRanks) -> LocalUpdate:
        trainer = SiloTrainer(it.bundle, silo_data(PAIRS), SILO, DeviceSettings(device="cpu", threads=1), ranks=ranks)
        return trainer.train(round_number=1, model_path=it.model, model=it.manifest, update_path=it.folder / "again")

    for name in ("update", "again"):
        (it.folder / name).write_bytes(b"\xff" * (9 << 20))
    first = in_forked_ranks(3, it.trained)
    second = in_forked_ranks(3, again)
    assert len({unhurried(outcome) for outcome in (*first, *second)}) == 1
    assert len({outcome.mark for outcome in first}) == 1
    assert it.bytes() == it.bytes("again")
    manifest = manifest_of(it.bundle.layout, [it.bytes()], it.bundle.layout.chunk_bytes)
    assert first[0].manifest == manifest
    norm = np.linalg.norm(np.frombuffer(it.bytes(), dtype="<f4").astype(np.float64))
    assert math.isclose(first[0].delta_norm, float(norm), rel_tol=1e-6)


def test_a_part_that_a_rank_cannot_write_keeps_all_from_the_update(tmp_path: Path) -> None:
    it = Round(tmp_path, optimizer="adamw", steps=1)
    outcomes = in_forked_ranks(2, lambda ranks: it.trained(ranks, "update" if ranks.rank == 0 else "nowhere/update"))
    assert isinstance(outcomes[0], AnotherRankFailed)
    assert isinstance(outcomes[1], StorageError)
    assert not (tmp_path / "update").exists()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def stopped(it: Round, ranks: Ranks, after: int | None = None) -> tuple[int, list[str]]:
    """How many steps were made, and what was said, of a training that is stopped after so many steps."""
    steps, said = [0], []

    def on_progress(fraction: float, loss: float) -> None:
        steps[0] += 1

    with suppress(TrainingStopped):
        it.trained(
            ranks,
            checkpoint_path=it.folder / "checkpoint",
            on_progress=on_progress,
            on_notice=lambda event, detail: said.append(f"{event} {detail}"),
            should_stop=lambda: steps[0] == after,
        )
    return steps[0], said


def test_a_training_of_shards_goes_on_from_the_parts_that_were_committed_together(tmp_path: Path) -> None:
    """Where one rank finds another part than was committed none goes on; nor does one process."""
    two_epochs = {"optimizer": "adamw", "epochs": 2, "batch_size": 8, "dropout": 0.2}
    undisturbed, it = (Round(tmp_path / name, **two_epochs) for name in ("whole", "cut"))

    def cut(ranks: ShardedRanks) -> None:
        undisturbed.trained(ranks)
        stopped(it, ranks, 3)

    in_forked_ranks(2, cut)
    left = {path.name: path.read_bytes() for path in it.folder.glob("checkpoint*")}
    assert sorted(left) == ["checkpoint", "checkpoint.2-0", "checkpoint.2-1"]
    assert {path.stat().st_mode & 0o777 for path in it.folder.glob("checkpoint*")} == {0o600}

    def resumed(ranks: ShardedRanks) -> Any:
        told = stopped(it, ranks), it.bytes()
        ranks.any(told=False)
        name = f"checkpoint.2-{ranks.rank}"
        # Rank 1 finds the part of rank 0: whole, of this training, and not what was committed as its own.
        (it.folder / name).write_bytes(left["checkpoint.2-0"])
        if ranks.rank == 0:
            (it.folder / "checkpoint").write_bytes(left["checkpoint"])
        ranks.any(told=False)
        return told, stopped(it, ranks, 1)

    outcomes = in_forked_ranks(2, resumed)
    for (goes_on, made), (steps, _) in outcomes:
        assert goes_on == (2, ["training-resumed after epoch 1, optimizer step 2"])
        assert made == undisturbed.bytes()
        assert steps == 1
    assert "names another part than is there" in outcomes[1][1][1][0]
    (it.folder / "checkpoint").write_bytes(left["checkpoint"])
    _, said = stopped(it, ALONE, 1)
    assert "is of another training (its backend is gloo" in said[0]


def test_a_checkpoint_is_of_one_way_and_one_number_of_ranks() -> None:
    class Rank(ShardedRanks):
        def __init__(self, world: int, *, sharded: bool) -> None:
            self.rank, self.world, self.backend, self.sharded = 0, world, "gloo", sharded  # type: ignore[misc]

    def identity(ranks: Ranks) -> Any:
        return training_identity(
            plan=digest_of(b"plan"),
            round_number=1,
            silo=SILO,
            model=digest_of(b"model"),
            examples=EXAMPLES,
            device=CPU,
            ranks=ranks,
        )

    made = {identity(Rank(world, sharded=sharded)) for world in (2, 3) for sharded in (False, True)}
    assert len(made) == 4


EXAMPLES: EncodedExamples = examples_of(4)


# ---- parts of a vector ----------------------------------------------------------------------------------------------


def parts_of(model: Any, rank: int, world: int) -> BoundParameters:
    """What a rank holds of `model`, in memory of its own."""
    ranks = ShardedRanks.__new__(ShardedRanks)
    ranks.rank, ranks.world = rank, world
    layout = layout_of(model)
    tensors, begins = [], []
    for (spec, start), whole in zip(layout.placed(), bind(model, layout).tensors, strict=True):
        rows = ranks.own_rows(spec.shape[0])
        tensors.append(nn.Parameter(whole.detach()[rows.start : rows.stop].clone()))
        begins.append(start + rows.start * (spec.elements // spec.shape[0]))
    return BoundParameters(layout.tensors, tuple(tensors), tuple(begins))


@pytest.mark.parametrize("world", [2, 3, 33])
def test_what_ranks_hold_is_the_vector_each_number_once(world: int) -> None:
    """Also where there are more ranks than rows of some tensor, of which some then hold none."""
    model = random_model()
    held = sorted(
        (part for rank in range(world) for part in parts_of(model, rank, world).held), key=lambda part: part.start
    )
    assert held[0].start == 0
    assert held[-1].stop == layout_of(model).parameters
    assert all(one.stop == next_.start for one, next_ in pairwise(held))


@pytest.mark.parametrize("known", [True, False])
def test_a_rank_reads_what_it_holds_and_trusts_no_file_that_was_not_checked(known: bool, tmp_path: Path) -> None:
    """Of a file that this machine has checked it reads its own ranges alone; else every chunk of it is looked at."""
    model, other = random_model(1, d_ff=512), random_model(2, d_ff=512)
    layout, manifest = layout_of(model), write_model(model, tmp_path / "model")
    with VectorReader(tmp_path / "model", manifest, layout, None) as reader:
        load_vector(bind(other, layout), reader)
        mark = reader.checked()
    for rank in range(3):
        expected, parts = parts_of(model, rank, 3), parts_of(random_model(2, d_ff=512), rank, 3)
        with VectorReader(tmp_path / "model", manifest, layout, mark if known else None) as reader:
            load_vector(parts, reader)
            reader.checked()
        for own, wanted in zip(parts.tensors, expected.tensors, strict=True):
            assert torch.equal(own, wanted)
    first = parts_of(model, 0, 3).held[0]
    raw = bytearray((tmp_path / "model").read_bytes())
    raw[4 * first.stop] ^= 1  # of another rank
    (tmp_path / "model").write_bytes(raw)
    with VectorReader(tmp_path / "model", manifest, layout, mark) as reader:
        parts = parts_of(model, 0, 3)
        with pytest.raises(IntegrityError, match="does not have the digest"):
            load_vector(parts, reader)


@pytest.mark.parametrize("masked", [True, False])
def test_ranks_write_what_one_process_writes_of_the_same_model(masked: bool, tmp_path: Path) -> None:
    """To the byte, whoever holds how much of a tensor: what is alike in it is judged in all of it, and each number has
    its own noise."""
    before = random_model(1, d_ff=4096)
    after = random_model(1, d_ff=4096)
    with torch.no_grad():
        for parameter in after.parameters():  # AdamW's first step: a delta whose numbers are alike, but for some rows
            step = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            step[: len(step) // 2] = 1e-3 * step[: len(step) // 2].sign()
            parameter += 1e-3 * step
    layout, manifest = layout_of(after), write_model(before, tmp_path / "model")

    def written(ranks: Ranks, name: str) -> WrittenUpdate:
        part = part_of(layout, manifest, 4, ranks)
        return write_update(
            tmp_path / name,
            layout,
            parameters=parts_of(after, ranks.rank, ranks.world) if ranks.sharded else bind(after, layout),
            round_model=VectorReader(tmp_path / "model", manifest, layout, None, part),
            feedback=no_feedback(tmp_path, layout),
            spread=Spread(bytes(range(32)), 0.5) if masked else None,
            part=part,
            ranks=ranks,
        )

    one = written(ALONE, "one")
    for world in (2, 3):
        (tmp_path / "ranks").write_bytes(b"\xff" * (layout.total_bytes + 1))
        for outcome in in_forked_ranks(world, lambda ranks: written(ranks, "ranks")):
            assert (outcome.manifest, outcome.norm) == (one.manifest, one.norm)
        assert (tmp_path / "ranks").read_bytes() == (tmp_path / "one").read_bytes()


def no_feedback(folder: Path, layout: Layout) -> Feedback:
    residuals = Residuals(folder=folder, plan=digest_of(b"plan"), layout=layout, notice=lambda event, detail: None)
    return Feedback(residuals=residuals, included=None)


class Fewer(Alone):
    """A group of shards some of which are nobody's."""

    def __init__(self) -> None:
        object.__setattr__(self, "sharded", True)


def test_an_update_of_which_a_part_is_missing_is_none(tmp_path: Path) -> None:
    """In its file is then what an earlier round left there."""
    model = random_model()
    layout, manifest = layout_of(model), write_model(model, tmp_path / "model")
    (tmp_path / "update").write_bytes(bytes(layout.total_bytes))
    with pytest.raises(StateError, match=rf"ranks wrote \d+ of {layout.parameters} numbers of update"):
        write_update(
            tmp_path / "update",
            layout,
            parameters=parts_of(model, 0, 2),
            round_model=VectorReader(tmp_path / "model", manifest, layout, None),
            feedback=no_feedback(tmp_path, layout),
            ranks=Fewer(),
        )
    assert not (tmp_path / "update").exists()


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, 1])
def test_a_model_is_not_dealt_out_to_one(processes: int) -> None:
    with pytest.raises(ValueError, match=f"processes is {processes}: set processes to 2 or more, or leave sharded out"):
        TrainingSection(processes=processes, sharded=True)
    assert not Settings().training.sharded


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"training": {"optimizer": "adafactor"}}, '[training] optimizer = "adafactor"'),
        ({"training": {"optimizer": "sgd"}}, '[training] optimizer = "sgd"'),
        (PRIVATE, '[privacy] level = "record"'),
        ({"wire": {"update": "bfloat16"}}, '[wire] update = "bfloat16"'),
        ({"wire": {"update": "int8"}}, '[wire] update = "int8"'),
    ],
)
def test_a_plan_that_shards_cannot_train_is_refused_by_name(sections: dict[str, Any], named: str) -> None:
    sections = {**sections, "training": {"optimizer": "adamw", **sections.get("training", {})}}
    plan = bundle_of(random_model(), **sections).plan
    (refusal,) = rank_refusals(SILO, plan, 2, sharded=True)
    assert refusal.rule == "sharded"
    assert refusal.rule in RULES, "or the agent could neither count nor keep it"
    assert named in str(refusal)
    assert "set sharded to false" in str(refusal)
    assert not list(rank_refusals(SILO, plan, 2))


def test_a_plan_of_adapters_is_refused_by_name() -> None:
    plan = bundle_of(random_model(), training={"optimizer": "adamw"}).plan
    adapted = plan.model_copy(update={"adapters": plan.adapters.model_copy(update={"rank": 4})})
    (refusal,) = rank_refusals(SILO, adapted, 2, sharded=True)
    assert "[adapters] rank = 4" in str(refusal)
    assert not list(rank_refusals(SILO, plan, 2, sharded=True))


def test_the_policy_of_a_silo_of_shards_refuses_before_anything_starts() -> None:
    bundle = bundle_of(random_model(), training={"optimizer": "sgd"})
    rules = Settings().policy
    for sharded, refused in ((False, []), (True, ["sharded"])):
        policy = SiloPolicy(rules=rules, silo=SILO, processes=2, sharded=sharded)
        assert [refusal.rule for refusal in policy.objections(bundle)] == refused
