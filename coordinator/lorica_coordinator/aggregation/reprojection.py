"""The mean of products B A, cut to the rank of a single one: the best such product that there is.

FlexLoRA (Bai, Chen, Qian, Yao and Li, Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
Client Resources, NeurIPS 2024): with shares p the server makes W = sum p_i B_i A_i, of shape (rows, columns), and its
singular value decomposition W = U S V', and hands out B = U S and A = V' of the r largest singular values. By Eckart
and Young (1936) no product of rank r is nearer to W; in the Frobenius norm it is off by the root of the sum of squares
of the singular values that are cut off. W has rank n r at most for n silos, and where it is r or less, nothing is cut.

A has orthonormal rows, those of singular values 0 as well, and B zeros beside them: as with adapters that begin, such a
direction adds nothing and can be learnt. Rows have the length 1, where PEFT's A begins with about 0.58.

W itself is not made where n r is less than its shorter side: a QR decomposition of the B side by side, and one of the A
below each other, leave a core of n r x n r with the same singular values. Memory is what is smaller of both, in
float64: n r (rows + columns) numbers, or rows x columns.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import MalformedMessage

Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Part:
    """One silo's `share` of the mean, its `b` of shape (rows, rank) and its `a` of shape (rank, columns)."""

    share: float
    b: Matrix
    a: Matrix


@dataclass(frozen=True, slots=True)
class Cut:
    """`b` @ `a` is the mean of products, but for singular values that are `dropped`, the largest first."""

    b: Matrix
    a: Matrix
    dropped: Matrix


def reprojected(parts: Iterable[Part], *, silos: int, rows: int, columns: int, rank: int) -> Cut:
    """Of `silos` parts, which are looked at once, one after the other.

    The same parts give the same bits on one machine; which of two equal singular values comes first is LAPACK's to say.
    Each row of `a` has its largest number, the first of equal ones, above 0. Raises MalformedMessage for numbers that
    are not finite.
    """
    try:
        if silos * rank < min(rows, columns):
            left, values, right = _of_factors(list(parts))
        else:
            left, values, right = _of_product(parts, np.zeros((rows, columns)))
    except np.linalg.LinAlgError as error:
        raise MalformedMessage(
            f"the mean of merged adapters has no singular values ({error}): leave out the silo whose delta is longest"
        ) from error
    kept = min(rank, len(values))
    a = np.zeros((rank, columns))
    b = np.zeros((rows, rank))
    a[:kept], b[:, :kept] = right[:kept], left[:, :kept] * values[:kept]
    largest = np.take_along_axis(a, np.abs(a).argmax(axis=1)[:, None], axis=1)[:, 0]
    signs = np.where(largest < 0.0, -1.0, 1.0)
    return Cut(b * signs, a * signs[:, None], values[kept:])


def _of_factors(parts: list[Part]) -> tuple[Matrix, Matrix, Matrix]:
    """U, the singular values and V' of the sum, without the sum."""
    left, left_core = np.linalg.qr(_finite(np.concatenate([part.share * part.b for part in parts], axis=1)))
    right, right_core = np.linalg.qr(_finite(np.concatenate([part.a for part in parts], axis=0)).T)
    inner, values, outer = np.linalg.svd(left_core @ right_core.T)
    return left @ inner, values, outer @ right.T


def _of_product(parts: Iterable[Part], product: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """The same by the sum, which is made in `product`, of zeros."""
    for part in parts:
        product += part.share * part.b @ part.a
    left, values, right = np.linalg.svd(_finite(product), full_matrices=False)
    return left, values, right


def _finite(matrix: Matrix) -> Matrix:
    if not np.isfinite(matrix).all():
        raise MalformedMessage("merged adapters hold NaN or infinite values: leave out the silo whose delta has them")
    return matrix
