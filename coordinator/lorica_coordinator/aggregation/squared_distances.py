"""Squared L2 distances between deltas, from each to a centre, and of their mean from zero; inner products: one pass, in
float64.

Differences are taken before they are squared, so that deltas which are nearly alike are not lost in the rounding of
their lengths. A delta is cut into blocks that begin at multiples of BLOCK, whatever the pieces that it comes in, and
the sums of blocks are added in order: no result depends on pieces, threads or the order of the silos, not by a bit.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName

BLOCK: Final = 4096
"""Elements; few enough that no BLAS gives them to several threads."""

Piece = NDArray[np.float32]
Distances = NDArray[np.float64]


def between(silos: Sequence[SiloName], pieces: Iterable[Piece]) -> Distances:
    """The squared distance of each silo's delta from each other's, in the order of `silos`.

    A piece has a row for each silo; every piece but the last one is a multiple of BLOCK long. Raises MalformedMessage,
    naming the silo, for a row that holds NaN or infinite values.
    """
    count = len(silos)
    upper = np.zeros((count, count))
    for block in _blocks(silos, pieces):
        for index in range(count - 1):
            difference = block[index + 1 :] - block[index]
            upper[index, index + 1 :] += np.vecdot(difference, difference)
    return upper + upper.T


def to_centre(silos: Sequence[SiloName], pieces: Iterable[tuple[Piece, Piece]]) -> Distances:
    """The squared distance of each silo's delta from a centre, of which each piece has its part. Raises as
    `between`."""
    squares = np.zeros(len(silos))
    for rows, centre in pieces:
        for block, at in zip(_blocks(silos, [rows]), _cut(centre[np.newaxis]), strict=True):
            difference = block - at
            squares += np.vecdot(difference, difference)
    return squares


def inner_products(silos: Sequence[SiloName], pieces: Iterable[Piece]) -> Distances:
    """Of each silo's delta with each other's and its own. Raises as `between`."""
    count = len(silos)
    products = np.zeros((count, count))
    for block in _blocks(silos, pieces):
        for index in range(count):
            products[index, index:] += np.vecdot(block[index:], block[index])
    return np.triu(products) + np.triu(products, 1).T


def squared_norm_of_mean(silos: Sequence[SiloName], factors: Sequence[float], pieces: Iterable[Piece]) -> float:
    """Of the sum of each silo's delta times its factor. Raises as `between`."""
    total = 0.0
    for block in _blocks(silos, pieces):
        mean = np.zeros(block.shape[1])
        for factor, row in zip(factors, block, strict=True):
            mean += factor * row
        total += float(np.dot(mean, mean))
    return total


def _blocks(silos: Sequence[SiloName], pieces: Iterable[Piece]) -> Iterator[NDArray[np.float64]]:
    for piece in pieces:
        finite = [bool(np.isfinite(row).all()) for row in piece]
        if not all(finite):
            guilty = ", ".join(silo for silo, fine in zip(silos, finite, strict=True) if not fine)
            raise MalformedMessage(
                f"the delta of silo {guilty} holds NaN or infinite values: refuse it and leave the silo out"
            )
        yield from _cut(piece)


def _cut(piece: Piece) -> Iterator[NDArray[np.float64]]:
    for first in range(0, piece.shape[1], BLOCK):
        yield piece[:, first : first + BLOCK].astype(np.float64)
