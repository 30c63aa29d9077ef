"""Deltas of any size whose weighted sum is known without adding them up.

Coordinate j of a silo's delta is the scale of its tensor times number j mod PERIOD of the silo's own table. Scales are
powers of two, so each float32 of it is exact, and the weighted sum is the scale times the sum of the tables. Tables are
heavy-tailed and partly alike, tensors and weights lie orders of magnitude apart, as those of a T5 that is fine-tuned at
several silos do.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lorica_security.secure_aggregation.masked_vectors.fixed_point import FloatBlock, WideBlock

PERIOD = 1_048_573
"""A prime, so that tensors of one shape differ."""
SCALES = (2.0**-10, 2.0**-20, 2.0**-13, 2.0**-17, 2.0**-7)
ALIKE = 0.4
LIGHTEST, SPREAD = 10.0, 50.0
"""The least weight, and how many times it the largest one is."""


class Deltas:
    """Of `silos` silos with tensors of these `sizes`; silos are counted from 0."""

    def __init__(self, silos: int, sizes: Sequence[int]) -> None:
        self.weights = [LIGHTEST * SPREAD ** (index / max(silos - 1, 1)) for index in range(silos)]
        self.elements = sum(sizes)
        common = _drawn(silos)
        self._tables: list[FloatBlock] = [
            (ALIKE * common + (1 - ALIKE) * _drawn(index)).astype("<f4") for index in range(silos)
        ]
        self._tensors: list[tuple[float, int, int]] = []
        end = 0
        for scale, size in zip(cycle(SCALES), sizes, strict=False):
            self._tensors.append((scale, end, end + size))
            end += size

    def read(self, silo: int, out: FloatBlock, first: int) -> None:
        """Fill `out` with the silo's coordinates from `first` on."""
        self._fill(self._tables[silo], out, first)

    def mean(self, silos: Iterable[int]) -> Callable[[WideBlock, int], None]:
        """As `read`, of these silos' weighted mean."""
        return partial(self._fill, self._mean_table(silos))

    def _mean_table(self, silos: Iterable[int]) -> WideBlock:
        table: WideBlock = np.zeros(PERIOD)
        weight_sum = 0.0
        for silo in silos:
            table += self.weights[silo] * self._tables[silo].astype(np.float64)
            weight_sum += self.weights[silo]
        table /= weight_sum
        return table

    def _fill(self, table: NDArray[np.floating], out: NDArray[np.floating], first: int) -> None:
        for scale, begin, end in self._tensors:
            at = max(begin, first)
            for piece in _pieces(table, at, min(end, first + len(out))):
                np.multiply(piece, table.dtype.type(scale), out=out[at - first : at - first + len(piece)])
                at += len(piece)


Number = TypeVar("Number", bound=np.floating)


def _pieces(table: NDArray[Number], begin: int, end: int) -> Iterator[NDArray[Number]]:
    """What coordinates [begin, end) take from a table, piece after piece."""
    while begin < end:
        start = begin % PERIOD
        piece = table[start : start + end - begin]
        yield piece
        begin += len(piece)


def _drawn(seed: int) -> WideBlock:
    """Student's t with 4 degrees of freedom."""
    normal = torch.randn(5, PERIOD, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn: WideBlock = (normal[0] / normal[1:].square().mean(0).sqrt()).numpy()
    return drawn
