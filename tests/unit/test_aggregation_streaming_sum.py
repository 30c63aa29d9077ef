import itertools
import math
from collections.abc import Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorica_coordinator.aggregation.streaming_sum import Scratch, weighted_mean
from lorica_coordinator.aggregation.weighting import CohortWeights, SiloSummary, WeightCaps, weigh
from lorica_security.errors import MalformedMessage, StateError
from lorica_security.identifiers import SiloName, silo_name
from silo_wire.weightings.lorar import LORAR

CPU = torch.device("cpu")
NAMES = [silo_name(name) for name in ("bank", "clinic", "hospital", "insurer")]


def cohort_of(examples: dict[SiloName, int], *, caps: WeightCaps | None = None) -> CohortWeights:
    summaries = [
        SiloSummary(silo=silo, examples=count, loss_reduction=0.5, optimizer_steps=1, delta_norm=2.0)
        for silo, count in examples.items()
    ]
    return weigh(summaries, weighting=LORAR, caps=caps or WeightCaps())


def random_deltas(length: int, *, seed: int) -> dict[SiloName, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {silo: torch.randn(length, generator=generator) * 10.0**-i for i, silo in enumerate(NAMES)}


def in_order(deltas: dict[SiloName, Tensor]) -> Iterator[tuple[SiloName, Tensor]]:
    return iter(sorted(deltas.items()))


def mean_of(deltas: Iterable[tuple[SiloName, Tensor]], cohort: CohortWeights) -> Tensor:
    given = list(deltas)
    return weighted_mean(given, cohort, Scratch.of(given[0][1].numel(), CPU))


FOUR = cohort_of(dict(zip(NAMES, [100, 37, 600, 4], strict=True)))


def test_weighted_mean_by_hand() -> None:
    cohort = cohort_of({NAMES[0]: 1, NAMES[1]: 3})
    mean = mean_of([(NAMES[0], torch.tensor([4.0, -8.0])), (NAMES[1], torch.tensor([0.0, 2.0]))], cohort)
    assert mean.tolist() == [1.0, -0.5]


def test_a_delta_above_the_norm_cap_counts_scaled() -> None:
    cohort = cohort_of({NAMES[0]: 1, NAMES[1]: 1}, caps=WeightCaps(max_delta_norm=1.0))
    mean = mean_of([(NAMES[0], torch.tensor([2.0, 0.0])), (NAMES[1], torch.tensor([0.0, 2.0]))], cohort)
    assert mean.tolist() == [0.5, 0.5]


def test_the_norm_cap_bounds_the_mean() -> None:
    deltas = {silo: torch.full((400,), 10.0) for silo in NAMES}
    summaries = [
        SiloSummary(silo=s, examples=9, loss_reduction=1.0, optimizer_steps=1, delta_norm=200.0) for s in NAMES
    ]
    cohort = weigh(summaries, weighting=LORAR, caps=WeightCaps(max_delta_norm=0.5))
    mean = mean_of(in_order(deltas), cohort)
    assert float(mean.double().norm()) == pytest.approx(0.5, rel=1e-6)


def test_stays_within_its_stated_error_of_a_float64_mean() -> None:
    deltas = random_deltas(10_000, seed=3)
    terms = [silo.factor * deltas[silo.silo].double() for silo in FOUR.silos]
    exact = torch.stack(terms).sum(dim=0)
    bound = torch.stack(terms).abs().sum(dim=0) * (len(terms) + 1) * 2.0**-24
    mean = mean_of(in_order(deltas), FOUR)
    assert mean.dtype == torch.float32
    assert bool(((mean.double() - exact).abs() <= bound).all())


def test_one_silo_gives_exactly_its_own_delta() -> None:
    delta = random_deltas(1_000, seed=4)[NAMES[0]]
    delta[0] = -0.0
    mean = mean_of([(NAMES[0], delta)], cohort_of({NAMES[0]: 17}))
    assert mean.view(torch.int32).equal(delta.view(torch.int32))
    assert mean.data_ptr() != delta.data_ptr()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_arrival_order_does_not_change_a_bit(order: tuple[int, ...]) -> None:
    deltas = random_deltas(4_099, seed=5)
    examples = dict(zip(NAMES, [100, 37, 600, 4], strict=True))
    arrived = {NAMES[i]: deltas[NAMES[i]] for i in order}
    cohort = cohort_of({NAMES[i]: examples[NAMES[i]] for i in order})
    mean = mean_of(in_order(arrived), cohort)
    assert mean.equal(mean_of(in_order(deltas), FOUR))


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 600), st.integers(0, 7))
def test_slab_size_and_alignment_do_not_change_a_bit(length: int, slab: int, offset: int) -> None:
    deltas = {silo: delta[offset:] for silo, delta in random_deltas(length + offset, seed=6).items()}
    whole = mean_of(in_order(deltas), FOUR)
    parts = [
        mean_of(in_order({silo: delta[start : start + slab] for silo, delta in deltas.items()}), FOUR)
        for start in range(0, length, slab)
    ]
    assert torch.cat(parts).equal(whole)


def test_thread_count_does_not_change_a_bit() -> None:
    deltas = random_deltas(200_000, seed=7)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = mean_of(in_order(deltas), FOUR)
        torch.set_num_threads(2)
        together = mean_of(in_order(deltas), FOUR)
    finally:
        torch.set_num_threads(threads)
    assert alone.equal(together)


def test_deltas_are_read_one_silo_at_a_time_and_not_changed() -> None:
    deltas = random_deltas(100, seed=8)
    copies = {silo: delta.clone() for silo, delta in deltas.items()}
    read: list[SiloName] = []

    def reading() -> Iterator[tuple[SiloName, Tensor]]:
        for silo, delta in in_order(deltas):
            read.append(silo)
            yield silo, delta

    arriving = reading()
    with pytest.raises(StateError):
        weighted_mean(arriving, cohort_of({NAMES[0]: 1}), Scratch.of(100, CPU))
    assert read == NAMES[:2]
    mean_of(in_order(deltas), FOUR)
    assert all(deltas[silo].equal(copies[silo]) for silo in NAMES)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("culprit", NAMES)
@pytest.mark.parametrize("place", [0, 500, 1_002])
def test_nan_poisoning_is_found_and_the_silo_named(bad: float, culprit: SiloName, place: int) -> None:
    deltas = random_deltas(1_003, seed=9)
    deltas[culprit][place] = bad
    with pytest.raises(MalformedMessage, match=f"^the delta of silo {culprit} holds NaN or infinite values"):
        mean_of(in_order(deltas), FOUR)


def test_infinities_that_would_cancel_name_both_silos() -> None:
    deltas = random_deltas(8, seed=10)
    deltas[NAMES[1]][3], deltas[NAMES[2]][3] = math.inf, -math.inf
    with pytest.raises(MalformedMessage, match="silo clinic, hospital holds"):
        mean_of(in_order(deltas), FOUR)


def test_a_silo_of_no_weight_cannot_hide_a_nan() -> None:
    summaries = [
        SiloSummary(silo=NAMES[0], examples=5, loss_reduction=1.0, optimizer_steps=1, delta_norm=1.0),
        SiloSummary(silo=NAMES[1], examples=5, loss_reduction=0.0, optimizer_steps=1, delta_norm=1.0),
    ]
    cohort = weigh(summaries, weighting=LORAR)
    with pytest.raises(MalformedMessage, match="silo clinic"):
        mean_of([(NAMES[0], torch.ones(3)), (NAMES[1], torch.tensor([1.0, math.nan, 1.0]))], cohort)


def test_huge_finite_values_are_no_infinity() -> None:
    deltas = {silo: torch.full((5,), 1e38) for silo in NAMES}
    mean = mean_of(in_order(deltas), FOUR)
    assert mean.tolist() == pytest.approx([1e38] * 5, rel=1e-6)


def test_a_missing_silo_is_named() -> None:
    with pytest.raises(StateError, match="expected the delta of silo insurer, got None"):
        mean_of(itertools.islice(in_order(random_deltas(5, seed=11)), 3), FOUR)


def test_a_silo_out_of_order_is_named() -> None:
    backwards = sorted(random_deltas(5, seed=12).items(), reverse=True)
    with pytest.raises(StateError, match="expected the delta of silo bank, got insurer"):
        mean_of(backwards, FOUR)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4), torch.zeros(6), torch.zeros(5, dtype=torch.float16), torch.zeros(5, 1)]
)
def test_a_slab_of_another_shape_or_type_is_named(wrong: Tensor) -> None:
    deltas = random_deltas(5, seed=13)
    deltas[NAMES[2]] = wrong
    with pytest.raises(
        MalformedMessage, match=r"delta of silo hospital is .* expected flat float32 or bfloat16 of 5 elements"
    ):
        mean_of(in_order(deltas), FOUR)


def test_an_empty_slab_has_an_empty_mean() -> None:
    assert mean_of([(NAMES[0], torch.empty(0))], cohort_of({NAMES[0]: 1})).numel() == 0


@pytest.mark.parametrize("in_bfloat16", [{NAMES[0]}, {NAMES[2]}, set(NAMES)])
def test_a_delta_in_bfloat16_counts_as_the_float32_that_it_is(in_bfloat16: set[SiloName]) -> None:
    deltas = random_deltas(1_003, seed=14)
    short = {silo: delta.to(torch.bfloat16) if silo in in_bfloat16 else delta for silo, delta in deltas.items()}
    mean = mean_of(in_order(short), FOUR)
    assert mean.equal(mean_of(in_order({silo: delta.float() for silo, delta in short.items()}), FOUR))


def test_the_memory_of_the_last_slab_serves_the_next() -> None:
    scratch = Scratch.of(1_000, CPU)
    for length, seed in ((1_000, 15), (999, 16), (1, 17)):
        deltas = random_deltas(length, seed=seed)
        mean = weighted_mean(in_order(deltas), FOUR, scratch.first(length))
        assert mean.data_ptr() == scratch.mean.data_ptr()
        assert mean.equal(mean_of(in_order(deltas), FOUR))
