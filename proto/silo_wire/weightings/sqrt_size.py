"""The square root of the number of examples, sqrt(|D_i|): between equal weights and weights by size.

Multilingual models draw their languages so, at temperature 2 (Arivazhagan et al., Massively Multilingual Neural Machine
Translation in the Wild, 2019), lest the largest drown the others.
"""

import math
from typing import Final

from silo_wire.algorithm import Number
from silo_wire.weightings.weighting import Weighting

SQRT_SIZE: Final = Weighting(
    name="sqrt_size",
    meaning="square root of the examples",
    needs=frozenset({Number.EXAMPLES}),
    raw_weight=lambda told: math.sqrt(told.examples),
    first_cap="the square root of its examples",
)
