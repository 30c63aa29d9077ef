"""Float32's own steps make a lattice of a sum of deltas, which tells its parts; with noise within a step there is
none."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lorica_security.noise.noise_streams import bound_key
from lorica_security.noise.random_words import RandomWords
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint
from silo_agent.rounds.update import BLOCK_ELEMENTS
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.model.model import bind, layout_of
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.update.client_update import Feedback, write_update
from silo_agent.training.update.float_steps import StepNoise, binade
from silo_agent.training.update.masked_vector import KeptDelta, own_share, own_weight, write_masked_vector
from silo_agent.training.update.residual import Residuals
from silo_agent.training.update.spread import Spread
from silo_wire.canonical import digest_of
from silo_wire.messages import TrainingSummary
from silo_wire.plans.masked_ranges import plan_ranges
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.training import TrainingSection
from tests.support.tiny_t5 import random_model, write_model
from tests.support.undisturbed_training import train_undisturbed
from tests.unit.test_training_masked_vector import decoded_of, opened, work
from tests.unit.test_training_spread import cosine

KEY = bytes(range(32))
WORDS, WIDTH = 160, 16
RECORDS = (20, 31, 44)
SECTION = AggregationSection(secure_aggregation=True, weighting="lorar", max_weight=1000.0, delta_bound=1e-3)
LARGE = 4.0
"""Parameters above it have steps far above the last bit of a masked vector."""
TRAINING = TrainingSection(batch_size=2, learning_rate=1e-6, dropout=0.0, loss_reduction="logged")

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def examples_of(silo: int) -> EncodedExamples:
    drawn = np.random.default_rng(100 + silo)

    def rows(least: int, most: int) -> tuple[NDArray[np.int32], ...]:
        lengths = [int(drawn.integers(least, most)) for _ in range(RECORDS[silo])]
        return tuple(np.append(drawn.integers(3, WORDS, length), 1).astype("<i4") for length in lengths)

    return EncodedExamples(inputs=rows(5, 14), targets=rows(4, 12), inputs_cut=0, targets_cut=0, targets_with_unknown=0)


class Round:
    """One honest round: what each silo's embedding moved by, what it weighs, and what the sum is of the masked
    vectors."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        torch.manual_seed(0)
        before = random_model(dropout_rate=0.0, d_model=WIDTH, d_ff=24, num_layers=1, num_heads=2, vocab_size=WORDS)
        with torch.no_grad():
            before.shared.weight *= 12  # about what T5's own checkpoints have
        self.model: Floats = before.shared.weight.detach().numpy().reshape(-1).copy()
        layout, manifest = layout_of(before), write_model(before, folder / "model")
        point = FixedPoint.of(cohort=len(RECORDS), ranges=plan_ranges(SECTION, layout))
        first = next(begin for tensor, begin in layout.placed() if tensor.shape == (WORDS, WIDTH))
        embedding = slice(first, first + WORDS * WIDTH)
        words = np.zeros(point.words, dtype="<u4")
        self.moved: list[Floats] = []
        self.kept: list[Floats] = []
        self.shares: list[float] = []
        for silo in range(len(RECORDS)):
            own = folder / str(silo)
            own.mkdir()
            after = copy.deepcopy(before)
            summary = train_undisturbed(after, list(after.parameters()), examples_of(silo), TRAINING, seed=silo)
            self.moved.append(after.shared.weight.detach().numpy().reshape(-1) - self.model)
            self.shares.append(own_share(SECTION, summary))
            residuals = Residuals(folder=own, plan=digest_of(b"plan"), layout=layout, notice=lambda event, detail: None)
            written = write_update(
                own / "update",
                layout,
                parameters=bind(after, layout),
                round_model=VectorReader(folder / "model", manifest, layout, None),
                feedback=Feedback(residuals=residuals, included=None),
                spread=Spread(bytes([silo]) * 32, self.shares[silo]),
            )
            self.kept.append(np.fromfile(own / "update", dtype="<f4")[embedding])
            weight = own_weight(SECTION, summary)
            kept = KeptDelta(file=own / "update", manifest=written.manifest, mark=written.mark)
            write_masked_vector(own / "masked", work(point), kept, weight=weight)
            words += opened((own / "masked").read_bytes())
        self.total: Doubles = decoded_of(words, point)[embedding] / SECTION.weight_cap
        self.unit = SECTION.delta_bound / point.levels

    def taken_apart(self) -> tuple[float, list[float], list[float]]:
        """By who knows the weights, which reduction of the lattice tells.

        The share of the numbers that are of the lattice; there, how like each silo's delta is to what is found, and to
        the sum.
        """
        few = (np.abs(self.model) > LARGE) & (np.abs(self.total) > 1e-3 * spacing(self.model))
        step = spacing(self.model)[few]
        total = self.total[few] / step
        light, middle, heavy = self.shares
        times = np.arange(-24, 25)
        one, other = (it.reshape(-1) for it in np.meshgrid(times, times))
        rest = total[:, None] - (light * one + middle * other)
        third = np.round(rest / heavy)
        off = np.abs(rest - heavy * third)
        best, at = off.argmin(axis=1), np.arange(len(total))
        fits = off[at, best] < 2 * self.unit / step
        found = [one[best][fits], other[best][fits], third[at, best][fits]]
        deltas = [(it[few] / step)[fits] for it in self.moved]
        ways = zip(found, deltas, strict=True)
        return float(fits.mean()), [cosine(*both) for both in ways], [cosine(total[fits], it) for it in deltas]


def spacing(values: Floats) -> Doubles:
    return np.spacing(np.abs(values)).astype(np.float64)


def test_attack_a_sum_is_no_lattice_of_float32s_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the true trainer, in the true masked vectors, in a round that nobody cheats in."""
    with monkeypatch.context() as without:
        without.setattr(StepNoise, "of", lambda self, binades, begin: np.zeros_like(binades))
        fits, found, sums = Round(tmp_path / "plain").taken_apart()
    assert fits > 0.6
    assert min(found) > 0.8, "the attack finds nothing that is to be mended"
    assert sums[0] < 0.5
    mended = Round(tmp_path / "mended")
    fits, _, _ = mended.taken_apart()
    assert fits < 0.1
    for share, kept, moved in zip(mended.shares, mended.kept, mended.moved, strict=True):
        off = share * np.abs(kept - moved.astype(np.float64)) / spacing(mended.model)
        assert np.median(off) < 2, "what is not spread is in the sum within a step or two of what was trained"


@pytest.mark.parametrize("divisor", [2**8, 2**16, 2**20])
def test_attack_nothing_of_the_noise_falls_out_of_what_a_division_of_the_sum_leaves_over(divisor: int) -> None:
    """Were the noise whole multiples of a part of a step, as in each silo so in the sum, what is left over were the
    deltas'.

    Weights 0.31 and so on of steps are then seen by their fractions. With a power of two float32 rounds nothing away.
    """
    weights, count = (0.31, 0.17, 0.08), 1 << 15
    binades = np.ones(count, dtype="<f4")
    noise = [StepNoise(bytes([silo]) * 32, weight).of(binades, 0) for silo, weight in enumerate(weights)]
    in_sum = sum(weight * it.astype(np.float64) for weight, it in zip(weights, noise, strict=True)) * 2.0**23 * divisor
    left = in_sum % 1.0
    tenths, _ = np.histogram(left, bins=10, range=(0.0, 1.0))
    assert np.abs(tenths / count - 0.1).max() < 0.015, tenths


def smooth_steps(count: int, deviation: float) -> Doubles:
    return np.round(np.random.default_rng(3).normal(0, deviation, count))


@pytest.mark.parametrize("deviation", [2.0, 6.0])
def test_attack_no_frequency_of_a_sum_tells_a_weight(deviation: float) -> None:
    """Of numbers that one silo alone moved, by a few steps; the others' noise is in them, too. One uniform number would
    not do."""
    weights, count = (0.31, 0.17, 0.08), 1 << 17
    binades = np.ones(count, dtype="<f4")
    own = enumerate(weights)
    noise = [StepNoise(bytes([silo]) * 32, weight).of(binades, 0) * 2.0**23 for silo, weight in own]
    steps = smooth_steps(count, deviation)
    moved = steps * weights[0]
    frequencies = np.arange(0.6, 2.6, 0.02) / weights[0]

    def strongest(total: Doubles) -> float:
        return max(abs(np.exp(2j * np.pi * frequency * total).mean()) for frequency in frequencies)

    by_chance = 4 / np.sqrt(count)
    uniform = np.random.default_rng(4).uniform(-0.5, 0.5, count)
    assert strongest(moved) > 0.9
    assert strongest(moved + weights[0] * uniform) > by_chance, "what one uniform number of this silo's leaves"
    assert strongest(moved + sum(weight * its for weight, its in zip(weights, noise, strict=True))) < by_chance


def test_attack_numbers_that_did_not_move_leave_no_gap_that_tells_a_weight() -> None:
    """Those that moved are a step and more from 0: between 0 and one step times the least weight there was nothing."""
    count = 1 << 16
    steps = smooth_steps(count, 3.0)
    noise = StepNoise(KEY, 1.0).of(np.ones(count, dtype="<f4"), 0) * 2.0**23
    near = np.abs(steps + noise)
    found = [float(((near >= low) & (near < low + 0.1)).mean()) for low in (0.0, 0.2, 0.4, 0.6)]
    assert max(found) < 1.1 * min(found)


def test_attack_noise_where_nobody_moved_anything_does_not_tell_by_its_size_what_silos_weigh() -> None:
    binades = np.ones(1 << 16, dtype="<f4")
    heavy, light = (share * StepNoise(KEY, share).of(binades, 0) for share in (1.0, 0.01))
    assert np.allclose(heavy, light, rtol=1e-6)
    section = SECTION.model_copy(update={"max_weight_ratio": 20.0})
    told = TrainingSummary(
        examples=30, loss_max=3.0, loss_min=1.0, loss_first=3.0, loss_last=1.0, optimizer_steps=3, seconds=1.0
    )
    assert own_share(section, told) == 0.06
    assert own_share(section, replace(told, examples=3)) == 0.05, "no less than the plan's least weight"
    assert own_share(section, replace(told, examples=3000)) == 1.0
    for share in (0.0, 1.1, -0.5, float("nan")):
        with pytest.raises(ValueError, match="a share of"):
            StepNoise(KEY, share)


def test_noise_is_of_no_bias_within_two_steps_and_the_same_again() -> None:
    binades = np.full(BLOCK_ELEMENTS, 2.0**-5, dtype="<f4")
    binades[::2] = 2.0**3
    noise = StepNoise(KEY, 1.0).of(binades, 0)
    steps = noise.astype(np.float64) / binades * 2.0**23
    assert abs(steps.mean()) < 5 * 0.58 / np.sqrt(BLOCK_ELEMENTS)
    assert float(steps.std()) == pytest.approx(np.sqrt(1 / 3), rel=0.01)
    assert 1.5 < np.abs(steps).max() <= 2
    assert np.array_equal(StepNoise(KEY, 1.0).of(binades, 0), noise)
    for other in (StepNoise(bytes(32), 1.0).of(binades, 0), StepNoise(KEY, 1.0).of(binades, BLOCK_ELEMENTS)):
        assert abs(cosine(other, noise)) < 0.01
    assert not StepNoise(KEY, 1.0).of(np.zeros(7, dtype="<f4"), 0).any()
    with pytest.raises(ValueError, match="are not one block"):
        StepNoise(KEY, 1.0).of(binades, 1)


def test_a_step_is_that_of_the_larger_number() -> None:
    one = np.array([1.5, -0.1, 0.0, 1e-40, np.inf, -3.0], dtype="<f4")
    other = np.array([-5.0, 0.0, 0.0, 0.0, 1.0, 2.0], dtype="<f4")
    out = np.full_like(one, 9.0)
    binade(one, other, out)
    assert out.tolist() == [4.0, 0.0625, 0.0, 0.0, np.inf, 2.0]
    assert np.array_equal(out[:2] * np.float32(2.0**-23), np.spacing(np.array([5.0, 0.1], dtype="<f4")))


@pytest.mark.parametrize("count", [BLOCK_ELEMENTS, 70_000, 1001, 1])
def test_noise_is_of_the_words_of_aes_in_counter_mode_however_they_are_had(count: int) -> None:
    """And the same whatever was in its memory before: after a restart the same delta comes out again."""
    binades = np.exp2(-(np.arange(count) % 9)).astype(np.float32)
    made, begin = StepNoise(KEY, 0.3), 2 * BLOCK_ELEMENTS
    made.of(np.ones(BLOCK_ELEMENTS, dtype=np.float32), 0)
    words = RandomWords(bound_key(KEY, begin.to_bytes(8, "big")))
    coarse = words.words64(count).view(np.uint16).reshape(4, count).astype(np.int64).sum(axis=0)
    uniform = words.words32(count) * 2.0**-32 + coarse - 2 * (2**16 - 1) - 0.5
    np.testing.assert_array_equal(made.of(binades, begin), (uniform * (2.0**-39 / 0.3)).astype(np.float32) * binades)
