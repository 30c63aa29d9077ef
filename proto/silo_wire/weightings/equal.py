"""The same weight for every silo, 1: what no silo tells is needed."""

from typing import Final

from silo_wire.weightings.weighting import Weighting

EQUAL: Final = Weighting(
    name="equal",
    meaning="all silos the same",
    needs=frozenset(),
    raw_weight=lambda told: 1.0,
    promises=frozenset({"record", "joint", "silo"}),
    only_weight=1.0,
)
