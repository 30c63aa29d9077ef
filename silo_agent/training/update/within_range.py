"""A delta that goes beyond what a sum can express: the tensor in which it does is scaled down as a whole, and nothing
is cut.

Were it cut number by number, a heavy silo would add plus or minus the range nearly everywhere. A sum of such deltas and
one of a light silo is then a grid of known numbers, and what lies beside the grid is the light silo's delta. Scaled, a
heavy silo's delta keeps its shape, and the sum tells of a part no more than its share. ADR 17.
"""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from lorica_security.secure_aggregation.masked_vectors.fixed_point import BLOCK_ELEMENTS, Encoder, Ranges, Workspace
from silo_agent.rounds.update import FloatBlock

INSIDE: Final = 1 - 2.0**-22
"""Of the range: the largest number of a scaled tensor comes to, rounded to float32."""


def peaks(ranges: Ranges, values: FloatBlock, first: int) -> Iterator[tuple[int, float]]:
    """(tensor, largest size of a number) of each tensor that has numbers in `values`, which begin at coordinate
    `first`; NaN wins."""
    for tensor, begin, end in ranges.pieces(first, first + len(values)):
        piece = values[begin - first : end - first]
        yield tensor, max(float(piece.max()), -float(piece.min()))


class WithinRange:
    """What one silo's delta is multiplied by before `encoder` encodes it: `factor` everywhere, and a number of its own
    for a tensor.

    `largest` are the peaks of the delta as it is: one for each stretch that was looked at.
    """

    def __init__(self, encoder: Encoder, largest: Iterable[tuple[int, float]], *, factor: float = 1.0) -> None:
        self._ranges, self._most = encoder.fixed_point.ranges, encoder.fixed_point.levels
        self._factor = np.float32(factor)
        whole: dict[int, float] = {}
        for tensor, peak in largest:
            whole[tensor] = max(peak, whole.get(tensor, 0.0))
        self._beyond: dict[int, tuple[float, float]] = {}
        for tensor, peak in whole.items():
            scale = encoder.scale(tensor)
            reached = float(np.float32(peak) * self._factor) * scale
            if reached > self._most:
                self._beyond[tensor] = scale, self._most / reached * INSIDE

    def scale(self, values: FloatBlock, first: int, workspace: Workspace) -> int:
        """Multiply `values`, which begin at coordinate `first`, in place; how many of them were beyond their range."""
        if self._factor != 1:
            np.multiply(values, self._factor, out=values)
        if not self._beyond:
            return 0
        beyond = 0
        for tensor, begin, end in self._ranges.pieces(first, first + len(values)):
            if tensor in self._beyond:
                beyond += self._whole(values[begin - first : end - first], *self._beyond[tensor], workspace)
        return beyond

    def _whole(self, values: FloatBlock, scale: float, share: float, workspace: Workspace) -> int:
        beyond = 0
        for begin in range(0, len(values), BLOCK_ELEMENTS):
            block = values[begin : begin + BLOCK_ELEMENTS]
            wide = workspace.wide[: len(block)]
            np.multiply(block, scale, out=wide, dtype=np.float64)
            beyond += int(np.count_nonzero(np.abs(wide, out=wide) > self._most))
            np.multiply(block, share, out=wide, dtype=np.float64)
            np.copyto(block, wide, casting="same_kind")
        return beyond
