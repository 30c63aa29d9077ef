"""How local training allows for silos whose data differ: not at all, or by SCAFFOLD's control variates.

SCAFFOLD (Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, Algorithm 1
with option II) has each silo take s steps of SGD at the rate a, from the round model x,

    y = y - a (g(y) + c - c_i)                  delta_i = y - x after the last

with a control variate c_i of its own and their mean c, which the paper sends along with models and deltas. Afterwards

    c_i' = c_i - c - delta_i / (s a)            c' = c + mean of (c_i' - c_i) = -(mean of delta_i) / (s a)

the latter where all silos take part, since c is the mean of c_i. The server steps x' = x + b (mean of delta_i), so both
are known where they are needed: c from two round models, c_i from the silo's own deltas. Nothing more has to be sent.
Of both, a silo needs the difference h_i = c - c_i alone, and that becomes

    h_i' = c' - c_i' = h_i + (delta_i - mean of delta_i) / (s a)

Let p_i be the sum of the silo's own deltas, times b, added to the model at which the correction began:

    p_i = x, h_i = 0 at first                   p_i' = p_i + b delta_i              h_i' = (p_i' - x') / (b s a)

That is the same h_i: p_i' - x' = (p_i - x) + b (delta_i - mean of delta_i). So p_i, where the model would be if all
silos were like this one, is all that a silo keeps: one vector.

What the derivation needs: equal steps x rates at all silos, at a constant rate; steps in proportion to their gradients;
deltas that count the same and are not cut, so that their mean is what the server adds; a server without momentum; and
models and deltas in float32, since bfloat16's rounding of x' is larger than a delta. Gradients are clipped before the
correction is added, so that clipping changes what g is, and nothing of the above. The h_i of a cohort sum to zero. They
would not if a silo were missing of those that they were made with: then all begin anew with h_i = 0.
"""

from dataclasses import dataclass
from typing import Final, Literal

from silo_wire.algorithm import Number, Promise

DriftCorrectionName = Literal["none", "scaffold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftCorrection:
    """An `Algorithm`."""

    name: DriftCorrectionName
    meaning: str
    needs: frozenset[Number] = frozenset()
    masks: str = ""
    promises: frozenset[Promise] = frozenset()
    passes: int = 0


NO_CORRECTION: Final = DriftCorrection(
    name="none",
    meaning="each silo follows its own gradients",
    masks="the same",
    promises=frozenset({"record", "joint", "silo"}),
)
SCAFFOLD: Final = DriftCorrection(
    name="scaffold",
    meaning="to each gradient, what all silos' differ by from this silo's in the last round",
)
DRIFT_CORRECTIONS: Final = (NO_CORRECTION, SCAFFOLD)
