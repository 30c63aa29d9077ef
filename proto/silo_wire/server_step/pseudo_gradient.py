"""The sign of the server's step: the pseudo-gradient is minus the weighted mean delta.

A delta is local model minus round model, so it points downhill; an optimizer subtracts what it is given. This is the
Delta w of Zhang et al. 2023, Algorithm 1, and the -Delta_t that Reddi et al. 2020 hand to ServerOpt. Nothing else in
Lorica turns a sign.
"""

from torch import Tensor


def pseudo_gradient(mean_delta: Tensor) -> Tensor:
    """Turn `mean_delta` into the pseudo-gradient, in place, and return it."""
    return mean_delta.neg_()
