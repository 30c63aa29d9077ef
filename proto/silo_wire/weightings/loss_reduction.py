"""The loss reduction alone, dL_i: Lorar's factor without the number of examples."""

from typing import Final

from silo_wire.algorithm import Number
from silo_wire.weightings.weighting import Weighting

LOSS_REDUCTION: Final = Weighting(
    name="loss_reduction",
    meaning="loss reduction",
    needs=frozenset({Number.LOSS_REDUCTION}),
    raw_weight=lambda told: float(told.loss_reduction),
    first_cap="0.5",
    least_usual_cap=0.1,
)
