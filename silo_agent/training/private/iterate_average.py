"""The exponential moving average of what private training's steps lead to (De et
al. 2022, "Unlocking high-accuracy ...", section 3).

Noise throws each iterate about; the mean of the last of them is nearer to where they go. Iterates are made of noised
gradients alone, so their average is post-processing. It begins with the round model and is given 1/10 of that at first,
as if it had begun late: of iterate t, from 0, min(decay, (1 + t) / (10 + t)) of the average stays.
"""

from collections.abc import Sequence

import torch
from torch import nn


class IterateAverage:
    """Of `parameters`, a copy of which it holds; `decay` is from 0, which is the last iterate alone, to below 1."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters, self._decay, self._taken = parameters, decay, 0
        self._means = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def take(self) -> None:
        """Take in the parameters as they are after one more step."""
        stays = min(self._decay, (1 + self._taken) / (10 + self._taken))
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            mean.lerp_(parameter, 1 - stays)
        self._taken += 1

    @torch.no_grad()
    def give(self) -> None:
        """Set the parameters to their average."""
        for mean, parameter in zip(self._means, self._parameters, strict=True):
            parameter.copy_(mean)
