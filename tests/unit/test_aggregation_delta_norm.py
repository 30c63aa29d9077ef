import math

import pytest
import torch

from coordinator.aggregation.delta_norm import delta_norm
from security.errors import MalformedMessage
from security.identifiers import silo_name

BANK = silo_name("bank")


def test_three_four_is_five() -> None:
    assert delta_norm(BANK, [torch.tensor([3.0]), torch.tensor([0.0, -4.0])]) == 5.0


def test_no_elements_have_norm_zero() -> None:
    assert delta_norm(BANK, []) == 0.0
    assert delta_norm(BANK, [torch.empty(0)]) == 0.0


def test_agrees_with_an_exactly_rounded_sum() -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    exact = math.sqrt(math.fsum(value * value for value in values.tolist()))
    assert delta_norm(BANK, [values]) == pytest.approx(exact, rel=1e-14)


@pytest.mark.parametrize("slab", [1_000, 32_767, 32_768, 65_537, 99_999])
def test_slab_size_does_not_change_a_bit(slab: int) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(2)) * 1e-3
    assert delta_norm(BANK, values.split(slab)) == delta_norm(BANK, [values])


def test_large_finite_values_are_no_infinity() -> None:
    assert delta_norm(BANK, [torch.full((4,), 3e38)]) == pytest.approx(6e38, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40_000, 70_000])
def test_nan_poisoning_is_found_and_the_silo_named(bad: float, place: int) -> None:
    values = torch.zeros(70_001)
    values[place] = bad
    with pytest.raises(MalformedMessage, match="delta of silo bank holds NaN or infinite"):
        delta_norm(BANK, values.split(10_000))


@pytest.mark.parametrize("values", [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2)])
def test_other_types_and_shapes_are_refused(values: torch.Tensor) -> None:
    with pytest.raises(MalformedMessage, match="expected flat float32"):
        delta_norm(BANK, [values])
