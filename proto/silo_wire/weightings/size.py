"""The number of examples, |D_i|, as FedAvg weighs (McMahan et al., AISTATS 2017)."""

from typing import Final

from silo_wire.algorithm import Number
from silo_wire.weightings.weighting import Weighting

SIZE: Final = Weighting(
    name="size",
    meaning="examples",
    needs=frozenset({Number.EXAMPLES}),
    raw_weight=lambda told: float(told.examples),
    first_cap="its examples",
)
