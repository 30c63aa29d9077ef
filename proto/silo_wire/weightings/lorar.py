"""Lorar (Zhang et al., ACL 2023, Algorithm 1): the number of examples times the loss reduction, |D_i| * dL_i."""

from typing import Final

from silo_wire.algorithm import Number
from silo_wire.weightings.weighting import Weighting

LORAR: Final = Weighting(
    name="lorar",
    meaning="examples x loss reduction",
    needs=frozenset({Number.EXAMPLES, Number.LOSS_REDUCTION}),
    raw_weight=lambda told: told.examples * told.loss_reduction,
    promises=frozenset({"record", "silo"}),
    first_cap="half of its examples",
    least_usual_cap=10.0,  # of 100 examples that reduce their loss by 0.1
)
