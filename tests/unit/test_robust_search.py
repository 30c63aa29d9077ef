"""A search that tries to beat each robust reducer: it finds how far each can be brought, and nothing beyond that."""

import pytest
import torch

from silo_wire.plans.robust import ROBUST_RULES
from tests.support.robust_search import PROMISES, WITHOUT_RULE, Excess, Rows, worst_found

ROUNDING = 1e-5
"""Of float32, over what a rule promises exactly."""


def honest_deltas(silos: int, seed: int) -> Rows:
    """A direction that all share, and what each has of its own."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((silos, 4), generator=generator) + torch.tensor([1.0, 0.5, 0.0, -0.5])).numpy()


def worst(excess: Excess, hostile: int, honest: int) -> float:
    return max(worst_found(excess, honest_deltas(honest, seed), hostile, steps=150, seed=seed) for seed in range(3))


def test_every_rule_of_a_plan_is_attacked() -> None:
    assert set(PROMISES) == {rule.name for rule in ROBUST_RULES}


@pytest.mark.parametrize(
    ("reducer", "least"),
    [
        ("trimmed_mean", 0.999),
        ("median", 0.999),
        ("multi_krum", 0.3),
        ("centred_clipping", 0.999),
        ("nearest_neighbour_mixing", 0.05),
        ("geometric_median", 0.5),
    ],
)
@pytest.mark.parametrize("hostile", [1, 2])
def test_the_search_finds_nothing_beyond_what_a_rule_promises(reducer: str, least: float, hostile: int) -> None:
    """And comes close to it, where the promise is as small as it can be: so it does look."""
    found = worst(PROMISES[reducer], hostile, honest=hostile + 3)
    assert least <= found <= 1 + ROUNDING


@pytest.mark.parametrize("hostile", [1, 2])
def test_the_same_search_beats_a_plain_mean_at_once(hostile: int) -> None:
    assert worst(WITHOUT_RULE, hostile, honest=hostile + 3) > 1e20
