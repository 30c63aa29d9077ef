import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coordinator.aggregation.streaming_sum import weighted_mean
from coordinator.aggregation.weighting import CohortWeights, SiloSummary, WeightCaps, Weighting, weigh
from security.errors import MalformedMessage, StateError
from security.identifiers import SiloName, silo_name

CPU = torch.device("cpu")
NAMES = [silo_name(name) for name in ("bank", "clinic", "hospital", "insurer")]


def cohort_of(examples: dict[SiloName, int], *, caps: WeightCaps | None = None) -> CohortWeights:
    summaries = [
        SiloSummary(silo=silo, examples=count, loss_reduction=0.5, delta_norm=2.0) for silo, count in examples.items()
    ]
    return weigh(summaries, weighting=Weighting.LORAR, caps=caps or WeightCaps())


def random_deltas(length: int, *, seed: int) -> dict[SiloName, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {silo: torch.randn(length, generator=generator) * 10.0**-i for i, silo in enumerate(NAMES)}


def in_order(deltas: dict[SiloName, Tensor]) -> Iterator[tuple[SiloName, Tensor]]:
    return iter(sorted(deltas.items()))


FOUR = cohort_of(dict(zip(NAMES, [100, 37, 600, 4], strict=True)))


def test_weighted_mean_by_hand() -> None:
    cohort = cohort_of({NAMES[0]: 1, NAMES[1]: 3})
    mean = weighted_mean(
        [(NAMES[0], torch.tensor([4.0, -8.0])), (NAMES[1], torch.tensor([0.0, 2.0]))], cohort, device=CPU
    )
    assert mean.tolist() == [1.0, -0.5]


def test_a_delta_above_the_norm_cap_counts_scaled() -> None:
    cohort = cohort_of({NAMES[0]: 1, NAMES[1]: 1}, caps=WeightCaps(max_delta_norm=1.0))
    mean = weighted_mean(
        [(NAMES[0], torch.tensor([2.0, 0.0])), (NAMES[1], torch.tensor([0.0, 2.0]))], cohort, device=CPU
    )
    assert mean.tolist() == [0.5, 0.5]


def test_the_norm_cap_bounds_the_mean() -> None:
    deltas = {silo: torch.full((400,), 10.0) for silo in NAMES}
    summaries = [SiloSummary(silo=s, examples=9, loss_reduction=1.0, delta_norm=200.0) for s in NAMES]
    cohort = weigh(summaries, weighting=Weighting.LORAR, caps=WeightCaps(max_delta_norm=0.5))
    mean = weighted_mean(in_order(deltas), cohort, device=CPU)
    assert float(mean.double().norm()) == pytest.approx(0.5, rel=1e-6)


def test_stays_within_its_stated_error_of_a_float64_mean() -> None:
    deltas = random_deltas(10_000, seed=3)
    terms = [silo.factor * deltas[silo.silo].double() for silo in FOUR.silos]
    exact = torch.stack(terms).sum(dim=0)
    bound = torch.stack(terms).abs().sum(dim=0) * (len(terms) + 1) * 2.0**-24
    mean = weighted_mean(in_order(deltas), FOUR, device=CPU)
    assert mean.dtype == torch.float32
    assert bool(((mean.double() - exact).abs() <= bound).all())


def test_one_silo_gives_exactly_its_own_delta() -> None:
    delta = random_deltas(1_000, seed=4)[NAMES[0]]
    delta[0] = -0.0
    mean = weighted_mean([(NAMES[0], delta)], cohort_of({NAMES[0]: 17}), device=CPU)
    assert mean.view(torch.int32).equal(delta.view(torch.int32))
    assert mean.data_ptr() != delta.data_ptr()


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_arrival_order_does_not_change_a_bit(order: tuple[int, ...]) -> None:
    deltas = random_deltas(4_099, seed=5)
    examples = dict(zip(NAMES, [100, 37, 600, 4], strict=True))
    arrived = {NAMES[i]: deltas[NAMES[i]] for i in order}
    cohort = cohort_of({NAMES[i]: examples[NAMES[i]] for i in order})
    mean = weighted_mean(in_order(arrived), cohort, device=CPU)
    assert mean.equal(weighted_mean(in_order(deltas), FOUR, device=CPU))


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 600), st.integers(0, 7))
def test_slab_size_and_alignment_do_not_change_a_bit(length: int, slab: int, offset: int) -> None:
    deltas = {silo: delta[offset:] for silo, delta in random_deltas(length + offset, seed=6).items()}
    whole = weighted_mean(in_order(deltas), FOUR, device=CPU)
    parts = [
        weighted_mean(in_order({silo: delta[start : start + slab] for silo, delta in deltas.items()}), FOUR, device=CPU)
        for start in range(0, length, slab)
    ]
    assert torch.cat(parts).equal(whole)


def test_thread_count_does_not_change_a_bit() -> None:
    deltas = random_deltas(200_000, seed=7)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = weighted_mean(in_order(deltas), FOUR, device=CPU)
        torch.set_num_threads(2)
        together = weighted_mean(in_order(deltas), FOUR, device=CPU)
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
        weighted_mean(arriving, cohort_of({NAMES[0]: 1}), device=CPU)
    assert read == NAMES[:2]
    weighted_mean(in_order(deltas), FOUR, device=CPU)
    assert all(deltas[silo].equal(copies[silo]) for silo in NAMES)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("culprit", NAMES)
@pytest.mark.parametrize("place", [0, 500, 1_002])
def test_nan_poisoning_is_found_and_the_silo_named(bad: float, culprit: SiloName, place: int) -> None:
    deltas = random_deltas(1_003, seed=9)
    deltas[culprit][place] = bad
    with pytest.raises(MalformedMessage, match=f"^the delta of silo {culprit} holds NaN or infinite values"):
        weighted_mean(in_order(deltas), FOUR, device=CPU)


def test_infinities_that_would_cancel_name_both_silos() -> None:
    deltas = random_deltas(8, seed=10)
    deltas[NAMES[1]][3], deltas[NAMES[2]][3] = math.inf, -math.inf
    with pytest.raises(MalformedMessage, match="silo clinic, hospital holds"):
        weighted_mean(in_order(deltas), FOUR, device=CPU)


def test_a_silo_of_no_weight_cannot_hide_a_nan() -> None:
    summaries = [
        SiloSummary(silo=NAMES[0], examples=5, loss_reduction=1.0, delta_norm=1.0),
        SiloSummary(silo=NAMES[1], examples=5, loss_reduction=0.0, delta_norm=1.0),
    ]
    cohort = weigh(summaries, weighting=Weighting.LORAR)
    with pytest.raises(MalformedMessage, match="silo clinic"):
        weighted_mean([(NAMES[0], torch.ones(3)), (NAMES[1], torch.tensor([1.0, math.nan, 1.0]))], cohort, device=CPU)


def test_huge_finite_values_are_no_infinity() -> None:
    deltas = {silo: torch.full((5,), 1e38) for silo in NAMES}
    mean = weighted_mean(in_order(deltas), FOUR, device=CPU)
    assert mean.tolist() == pytest.approx([1e38] * 5, rel=1e-6)


def test_a_missing_silo_is_named() -> None:
    with pytest.raises(StateError, match="expected the delta of silo insurer, got None"):
        weighted_mean(itertools.islice(in_order(random_deltas(5, seed=11)), 3), FOUR, device=CPU)


def test_a_silo_out_of_order_is_named() -> None:
    backwards = sorted(random_deltas(5, seed=12).items(), reverse=True)
    with pytest.raises(StateError, match="expected the delta of silo bank, got insurer"):
        weighted_mean(backwards, FOUR, device=CPU)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(4), torch.zeros(6), torch.zeros(5, dtype=torch.bfloat16), torch.zeros(5, 1)]
)
def test_a_slab_of_another_shape_or_type_is_named(wrong: Tensor) -> None:
    deltas = random_deltas(5, seed=13)
    deltas[NAMES[2]] = wrong
    with pytest.raises(MalformedMessage, match=r"delta of silo hospital is .* expected flat float32 of 5 elements"):
        weighted_mean(in_order(deltas), FOUR, device=CPU)


def test_an_empty_slab_has_an_empty_mean() -> None:
    assert weighted_mean([(NAMES[0], torch.empty(0))], cohort_of({NAMES[0]: 1}), device=CPU).numel() == 0
