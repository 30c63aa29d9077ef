"""Private training: what it adds, what it divides by, what depends on the data, and what it refuses."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import T5ForConditionalGeneration

from lorica_security.errors import StateError
from lorica_security.noise.discrete_gaussian import SIGMA
from lorica_security.noise.random_words import RandomWords
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import Batch, EncodedExamples
from silo_agent.training.private import clipping as clipping_module
from silo_agent.training.private import private_optimizer, private_trainer
from silo_agent.training.private.clipping import Backend, clipping
from silo_agent.training.private.exact_noise import DoubleBlock, FloatBlock, StepNoise
from silo_agent.training.private.loss_sums import GRID, noised_reduction
from silo_agent.training.private.loss_sums import loss_sum as loss_sum_of_chunks
from silo_agent.training.private.per_example.chunks import Chunks
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.private.private_optimizer import PrivateOptimizer
from silo_agent.training.private.private_trainer import PrivateSchedule, clipping_norm, drawn_examples, train_privately
from silo_wire.plans.sections.training import TrainingSection
from tests.support.tiny_t5 import random_model
from tests.unit.test_training_private_gradients import VOCABULARY, parameters_of, t5

pytestmark = pytest.mark.slow

KEY = bytes(range(2, 34))
CPU = torch.device("cpu")
SCHEDULE = PrivateSchedule(
    sampling_rate=0.25,
    steps=3,
    expected_batch_size=8,
    noise_multiplier=1.0,
    max_grad_norm=0.5,
    loss_bound=8.0,
    loss_noise_multiplier=2.0,
    weight_cap=1000.0,
)
SECTION = TrainingSection(optimizer="adamw", learning_rate=1e-2, batch_size=3, max_grad_norm=0.5)


def examples_of(count: int, seed: int = 0) -> EncodedExamples:
    generator = np.random.default_rng(seed)

    def rows(most: int) -> tuple[np.ndarray, ...]:
        return tuple(
            generator.integers(2, VOCABULARY, generator.integers(1, most + 1)).astype(np.int32) for _ in range(count)
        )

    return EncodedExamples(inputs=rows(9), targets=rows(6), inputs_cut=0, targets_cut=0, targets_with_unknown=0)


def train(
    model: T5ForConditionalGeneration,
    examples: EncodedExamples,
    schedule: PrivateSchedule = SCHEDULE,
    *,
    section: TrainingSection = SECTION,
    backend: Backend = "ghost",
    should_stop: Callable[[], bool] = lambda: False,
    progress: list[float] | None = None,
) -> float | None:
    torch.manual_seed(5)  # dropout
    return train_privately(
        model,
        parameters_of(model),
        examples,
        section,
        schedule,
        backend=backend,
        words=RandomWords(KEY),
        on_progress=(lambda fraction: None) if progress is None else progress.append,
        should_stop=should_stop,
    )


def loss_sum(model: T5ForConditionalGeneration, examples: EncodedExamples, *, bound: float, most: int = 4) -> int:
    return loss_sum_of_chunks(model, examples, Chunks(model, most=most), bound=bound)


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# --- noise on sums


def noised(values: DoubleBlock, *, deviation: float, key: bytes = KEY, threads: int = 2, ahead: int = 3) -> FloatBlock:
    with ThreadPoolExecutor(threads) as pool:
        return StepNoise(key, [len(values)], pool, ahead=ahead).add(values, deviation=deviation)


def test_noise_has_the_deviation_that_was_asked_for() -> None:
    values = noised(np.full(300_000, 0.125), deviation=0.01)
    assert abs(values.mean() - 0.125) < 5 * 0.01 / 300_000**0.5
    assert values.std() == pytest.approx(0.01, rel=0.01)


def test_noise_is_that_of_the_key_and_of_nothing_else() -> None:
    once = noised(np.zeros(200_000), deviation=1.0)
    torch.manual_seed(9)
    for threads, ahead in ((1, 0), (4, 100)):
        assert np.array_equal(once, noised(np.zeros(200_000), deviation=1.0, threads=threads, ahead=ahead))
    assert not np.isclose(once, noised(np.zeros(200_000), deviation=1.0, key=bytes(32))).any(where=once != 0.0)


def test_no_block_of_noise_is_used_twice() -> None:
    """Neither within a tensor nor by the next one."""
    with ThreadPoolExecutor(2) as pool:
        noise = StepNoise(KEY, [150_000, 5, 70_000], pool, ahead=2)
        drawn = np.concatenate([noise.add(np.zeros(count), deviation=1.0) for count in (150_000, 5, 70_000)])
    assert len(np.unique(drawn)) > 0.95 * len(drawn)
    for lag in (5, 1 << 16, 150_000, 150_005):
        assert abs(np.corrcoef(drawn[lag:], drawn[:-lag])[0, 1]) < 5 / (len(drawn) - lag) ** 0.5


def test_sums_far_above_the_noise_keep_what_is_added() -> None:
    assert np.allclose(noised(np.array([1e4, -1e4]), deviation=1e-3), [1e4, -1e4], rtol=1e-6)


def test_of_a_sum_no_more_is_told_than_its_point_of_the_grid() -> None:
    """Which floats can come out would tell the rest, whatever noise was added (Mironov 2012)."""
    step = 0.01 / SIGMA
    points = np.rint(np.random.default_rng(1).normal(scale=0.05, size=200_000) / step)
    once = noised(points * step, deviation=0.01)
    for off in (-0.4, 0.4):
        assert np.array_equal(noised((points + off) * step, deviation=0.01), once)


# --- steps


@pytest.mark.parametrize("backend", ["ghost", "loop"])
def test_a_step_is_the_clipped_sum_over_the_expected_batch_size(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, by plain gradient descent, on every record: the divisor is the plan's, not the sample's size."""
    monkeypatch.setattr(
        private_trainer,
        "local_optimizer",
        lambda section, parameters: torch.optim.SGD(parameters, lr=section.learning_rate),
    )
    schedule = replace(SCHEDULE, sampling_rate=1.0, steps=1, noise_multiplier=0.0, loss_noise_multiplier=None)
    section = SECTION.model_copy(update={"learning_rate": 1.0})
    examples = examples_of(7)
    steps = {}
    for expected in (8, 16):
        model = t5()
        before = flat(model)
        assert (
            train(model, examples, replace(schedule, expected_batch_size=expected), section=section, backend=backend)
            is None
        )
        steps[expected] = flat(model) - before
    assert torch.allclose(steps[8], 2 * steps[16], atol=1e-5)
    assert float(steps[8].norm()) <= 7 * SCHEDULE.max_grad_norm / 8
    assert float(steps[8].norm()) > 0.05


def test_an_empty_sample_is_a_step_of_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        private_trainer,
        "local_optimizer",
        lambda section, parameters: torch.optim.SGD(parameters, lr=section.learning_rate),
    )
    schedule = replace(SCHEDULE, sampling_rate=1e-12, steps=1, loss_noise_multiplier=None)
    model = t5()
    before = flat(model)
    train(model, examples_of(5), schedule, section=SECTION.model_copy(update={"learning_rate": 1.0}))
    moved = (flat(model) - before) * SCHEDULE.expected_batch_size
    assert float(moved.std()) == pytest.approx(SCHEDULE.noise_multiplier * SCHEDULE.max_grad_norm, rel=0.03)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
@pytest.mark.parametrize("backend", ["ghost", "loop"])
def test_training_learns_where_noise_is_little(backend: Backend, optimizer: Any) -> None:
    schedule = replace(
        SCHEDULE, sampling_rate=0.5, steps=25, noise_multiplier=0.01, loss_noise_multiplier=0.01, expected_batch_size=6
    )
    model, examples = t5(), examples_of(12)
    before = loss_sum(model, examples, bound=8.0)
    weight = train(
        model, examples, schedule, section=SECTION.model_copy(update={"optimizer": optimizer}), backend=backend
    )
    after = loss_sum(model, examples, bound=8.0)
    assert after < 0.8 * before
    assert weight == pytest.approx((before - after) * 8.0 / GRID, abs=0.5)


def test_noise_is_added_once_a_step_to_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied weight has four names in T5, and gets the noise of one."""
    added: list[int] = []
    keys: set[bytes] = set()

    class Counted(StepNoise):
        def __init__(self, key: bytes, *others: Any, **more: Any) -> None:
            assert key not in keys
            keys.add(key)
            super().__init__(key, *others, **more)

        def add(self, values: DoubleBlock, *, deviation: float) -> FloatBlock:
            assert deviation == SCHEDULE.noise_multiplier * SCHEDULE.max_grad_norm
            added.append(len(values))
            return super().add(values, deviation=deviation)

    monkeypatch.setattr(private_optimizer, "StepNoise", Counted)
    model = t5()
    train(model, examples_of(20), replace(SCHEDULE, loss_noise_multiplier=None))
    assert added == [parameter.numel() for parameter in model.parameters()] * SCHEDULE.steps
    assert len(keys) == SCHEDULE.steps


@pytest.mark.parametrize("multiplier", [0.4, 3.0])
def test_noise_drawn_ahead_is_the_same(multiplier: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for an accelerator, whose gradients are made meanwhile: it draws the same examples and the same noise."""
    schedule = replace(SCHEDULE, noise_multiplier=multiplier, loss_noise_multiplier=None)
    models = [t5(), t5()]
    train(models[0], examples_of(20), schedule)
    accumulate = clipping_module.Ghost.accumulate
    began: list[PrivateOptimizer] = []
    construct = PrivateOptimizer.__init__

    def begin(optimizer: PrivateOptimizer, *others: Any, **more: Any) -> None:
        construct(optimizer, *others, **more)
        began.append(optimizer)

    def ahead(way: clipping_module.Ghost, batch: Batch) -> torch.Tensor:
        if began[0]._noise is None:
            began[0].begin_noise()
        return accumulate(way, batch)

    monkeypatch.setattr(PrivateOptimizer, "__init__", begin)
    monkeypatch.setattr(clipping_module.Ghost, "accumulate", ahead)
    train(models[1], examples_of(20), schedule)
    moved = [flat(model) - flat(t5()) for model in models]
    assert torch.equal(moved[0], moved[1])


# --- what would couple one example with others


def test_dropout_is_refused() -> None:
    with pytest.raises(StateError, match=r"dropout 0\.1"):
        train(t5(dropout=0.1), examples_of(5))


@pytest.mark.parametrize("backend", ["ghost", "loop"])
def test_one_record_more_moves_the_sum_of_gradients_by_no_more_than_the_bound(backend: Backend) -> None:
    """Wherever it stands, and however it changes the batches of the others."""
    model = t5().train()
    parameters, bound = parameters_of(model), 0.3

    def summed(examples: EncodedExamples) -> torch.Tensor:
        way = clipping(backend, model, parameters, max_grad_norm=bound)
        for _, batch in Chunks(model, most=3).of(examples, range(len(examples))):
            way.accumulate(batch)
        return torch.cat([parameter.summed_grad.flatten() for parameter in parameters])  # type: ignore[attr-defined]

    whole = examples_of(20)
    everything = summed(whole)
    for missing in (0, 7, 19):
        others = replace(
            whole,
            inputs=tuple(one for index, one in enumerate(whole.inputs) if index != missing),
            targets=tuple(one for index, one in enumerate(whole.targets) if index != missing),
        )
        moved = float((everything - summed(others)).norm())
        assert 0 < moved <= bound


def test_the_grid_of_much_noise_is_taken_off_the_clipping_norm() -> None:
    schedule = replace(SCHEDULE, noise_multiplier=1000.0, max_grad_norm=1.0)
    assert clipping_norm(schedule, 64_000_000) == pytest.approx(1 - 8000 * 1000 / 2**30)
    assert clipping_norm(replace(schedule, noise_multiplier=0.0), 64_000_000) == 1.0
    for noise in (7e4, 1e6):  # rounding takes 0.52 of the norm, and more than all of it
        with pytest.raises(StateError, match="too coarse"):
            clipping_norm(replace(schedule, noise_multiplier=noise), 64_000_000)


# --- units of several records


def grouped(*units: tuple[int, ...], seed: int = 0) -> EncodedExamples:
    return replace(examples_of(sum(map(len, units)), seed), units=units)


def test_a_sampled_unit_gives_one_of_its_records_and_each_as_often() -> None:
    examples, words = grouped((0, 1, 2, 3), (4,), (5, 6)), RandomWords(KEY)
    counts = np.zeros(7)
    for _ in range(4000):
        drawn = drawn_examples(examples, 0.5, words)
        owners = [next(index for index, unit in enumerate(examples.units or ()) if one in unit) for one in drawn]
        assert len(set(owners)) == len(owners)
        counts[drawn] += 1
    expected = 4000 * 0.5 / np.array([4, 4, 4, 4, 1, 2, 2])
    assert np.abs(counts - expected).max() < 5 * 4000**0.5 / 2


def test_an_empty_sample_of_units_is_empty() -> None:
    assert drawn_examples(grouped((0, 1), (2,)), 1e-15, RandomWords(KEY)) == []


def test_a_unit_counts_in_the_loss_as_one_record_of_its_mean_loss() -> None:
    model = t5()
    alone = [loss_sum(model, replace(examples_of(6), units=((index,),)), bound=8.0) for index in range(6)]
    together = loss_sum(model, grouped((0, 1, 2), (3, 4), (5,)), bound=8.0)
    assert together == sum(alone[:3]) // 3 + sum(alone[3:5]) // 2 + alone[5]


def test_a_unit_of_many_records_moves_the_weight_by_no_more_than_one_record_does() -> None:
    """Whatever its losses: they are cut one by one, and then averaged."""
    model, examples = t5(), examples_of(8)
    for bound in (0.5, 8.0):
        others = tuple((index,) for index in range(4))
        less = loss_sum(model, replace(examples, units=others), bound=bound)
        more = loss_sum(model, replace(examples, units=(*others, (4, 5, 6, 7))), bound=bound)
        assert 0 < more - less <= GRID


# --- what depends on the data


def test_neighbouring_data_sets_have_the_same_schedule() -> None:
    seen = []
    for count in (40, 41):
        progress: list[float] = []
        train(t5(), examples_of(count), progress=progress)
        seen.append(progress)
    assert seen[0] == seen[1] == [1 / 3, 2 / 3, 1.0]


def test_an_empty_data_set_trains_on_noise() -> None:
    progress: list[float] = []
    weight = train(t5(), examples_of(0), progress=progress)
    assert progress[-1] == 1.0
    assert weight is not None


def test_the_loss_sum_is_in_whole_steps_and_bounded_for_each_record() -> None:
    model, examples = t5(), examples_of(9)
    whole = loss_sum(model, examples, bound=8.0)
    for gone in range(9):
        kept = [index for index in range(9) if index != gone]
        fewer = replace(
            examples,
            inputs=tuple(examples.inputs[index] for index in kept),
            targets=tuple(examples.targets[index] for index in kept),
        )
        assert 0 <= whole - loss_sum(model, fewer, bound=8.0) <= GRID
    assert loss_sum(model, examples, bound=0.5) == 9 * GRID  # each loss is above


def test_the_loss_sum_does_not_depend_on_batches() -> None:
    model, examples = t5(), examples_of(9)
    sums = [loss_sum(model, examples, bound=8.0, most=size) for size in (1, 4, 9)]
    assert max(sums) == min(sums)


def test_a_loss_that_is_not_finite_counts_as_the_bound() -> None:
    model = t5()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    assert loss_sum(model, examples_of(4), bound=8.0) == 4 * GRID


def test_the_loss_reduction_is_noised_and_cut() -> None:
    drawn = np.array(
        [
            noised_reduction(5 * GRID, 2 * GRID, bound=2.0, noise_multiplier=0.5, cap=100.0, words=words)
            for words in [RandomWords(KEY)]
            for _ in range(4000)
        ]
    )
    assert drawn.mean() == pytest.approx(6.0, abs=5 / 4000**0.5)
    assert drawn.std() == pytest.approx(1.0, rel=0.06)
    cut = [
        noised_reduction(GRID, 0, bound=2.0, noise_multiplier=50.0, cap=3.0, words=words)
        for words in [RandomWords(KEY)]
        for _ in range(50)
    ]
    assert set(cut) == {0.0, 3.0} or (min(cut), max(cut)) == (0.0, 3.0)


@pytest.mark.parametrize("noise", [0.0, -1.0, float("inf"), float("nan")])
def test_a_loss_reduction_without_noise_is_not_released(noise: float) -> None:
    with pytest.raises(ValueError, match="noise_multiplier"):
        noised_reduction(1, 0, bound=2.0, noise_multiplier=noise, cap=3.0, words=RandomWords(KEY))


# --- what is refused


def test_a_module_that_no_test_covers_is_not_trained() -> None:
    model = t5()
    model.encoder.extra = nn.LayerNorm(32)
    with pytest.raises(StateError, match=r"encoder\.extra has type LayerNorm"):
        train(model, examples_of(6))


def test_training_stops_when_it_is_asked_to() -> None:
    asked: Sequence[int] = iter([0, 0, 1])  # type: ignore[assignment]
    with pytest.raises(TrainingStopped):
        train(t5(), examples_of(40), should_stop=lambda: bool(next(asked, 1)))  # type: ignore[call-overload]


# --- rows that belong to one example alone


@pytest.mark.parametrize("feed_forward", ["silu", "gelu_new", "gated-gelu", "relu"])
@pytest.mark.parametrize("width", [9, 11, 13])
def test_no_activation_rounds_otherwise_where_examples_are_together(feed_forward: str, width: int) -> None:
    """What is left beside whole vectors of the processor, with an odd width, is the last of an example that is
    alone."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": width, "num_heads": 1, "num_layers": 1}
    model = random_model(dropout_rate=0.0, feed_forward_proj=feed_forward, **sizes)
    words = model.config.vocab_size
    entered = {name: module for name, module in model.named_modules() if name.endswith(("wo", "final_layer_norm"))}
    for seed in range(4):
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 1.0)
        inputs, targets = torch.randint(2, words, (2, 16)), torch.randint(2, words, (2, 8))

        def left_by(rows: slice, inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> list[torch.Tensor]:
            seen: list[torch.Tensor] = []
            hooks = [it.register_forward_hook(lambda _m, given, _o: seen.append(given[0])) for it in entered.values()]
            example_losses(model, Batch(inputs[rows], torch.ones(2, 16, dtype=torch.bool)[rows], targets[rows], 0))
            for hook in hooks:
                hook.remove()
            return seen

        together = left_by(slice(0, 2))
        for row in range(2):
            alone = left_by(slice(row, row + 1))
            for each, other in zip(together, alone, strict=True):
                assert torch.equal(each[row : row + 1], other), seed


def test_an_example_that_is_left_out_leaves_no_trace_in_layer_norms_of_any_epsilon() -> None:
    """A word of zeros and no epsilon make what is not a number, which its factor of 0 does not take away."""
    model = t5()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.0
    with torch.no_grad():
        model.shared.weight[7] = 0.0
    rows = [np.array(row, dtype=np.int32) for row in ([3, 4, 5, 1], [3, 7, 5, 1])]
    target = np.array([6, 8, 1], dtype=np.int32)
    examples = EncodedExamples(
        inputs=tuple(rows), targets=(target, target), inputs_cut=0, targets_cut=0, targets_with_unknown=0
    )

    def summed(indices: list[int]) -> list[torch.Tensor]:
        way = clipping("ghost", model, parameters_of(model), max_grad_norm=1.0)
        for _, batch in Chunks(model, most=2).of(examples, indices):
            way.accumulate(batch)
        return [parameter.summed_grad.clone() for parameter in parameters_of(model)]

    for one, other in zip(summed([0]), summed([0, 1]), strict=True):
        assert torch.equal(one, other)


def test_no_number_that_is_none_goes_beside_the_noise() -> None:
    """As an integer it were one that noise of any size is nothing beside."""
    with ThreadPoolExecutor(1) as threads:
        values = np.array([np.nan, np.inf, -np.inf, 0.0] * 64)
        noised = StepNoise(KEY, [256], threads, ahead=1).add(values, deviation=1.0)
        plain = StepNoise(KEY, [256], threads, ahead=1).add(np.zeros(256), deviation=1.0)
    assert np.array_equal(noised, plain)
