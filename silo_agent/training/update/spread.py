"""Deltas whose numbers are of one size are spread before they are masked, or a sum over few silos could be taken apart.

An optimizer that divides each gradient by its own size, as AdamW does, moves nearly every parameter by plus or minus
the same number in its first steps. A sum over n silos with different weights then has 2^n values, which tell the
weights, and at each coordinate the sign of each silo: its delta. So each number of such a delta is multiplied by one of
this silo's own, drawn from the size of a normal variable and with the mean 1: what is summed is a normal variable then,
and the sum tells of a part no more than its share. ADR 16.

Deltas of more steps are spread by themselves where every step moved them. A row of the embedding is moved by the steps
that met its word, and a unit of ReLU by those that made it fire: a row or column that one step reached has numbers of
one size, which tells how many steps there were, and with them how many examples. So rows and columns are judged too.
Factors of their elements leave a row's length, which tells that size as well: what is spread by its rows or columns has
one more factor for each of them.

What is alike is judged before noise of float32's steps is added, which would hide it in numbers of a step or two, and
multiplied after.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from lorica_security.noise.noise_streams import NoiseStream, bound_key
from lorica_security.noise.random_words import RandomWords
from silo_agent.rounds.update import FloatBlock
from silo_agent.training.update.float_steps import StepNoise
from silo_wire.manifest import TensorSpec

MOST_ALIKE: Final = 0.25
"""Of a tensor's numbers that are not 0, this share may be of one size: of a normal variable 0.1 are, of AdamW's first
step all."""
DRAWN_TOGETHER: Final = 1 << 12
"""Factors. Of fewer each takes longer, and of a row all are drawn that stand beside its own."""
_SIZE_SHIFT: Final = 20
"""Of float32's bits: sizes that agree in exponent and three more bits are within 12 %; two such classes beside each
other count as one size."""
_ONE_SIZE: Final = np.uint32(2 << _SIZE_SHIFT)
"""Of a row or column: numbers whose sizes, as float32's bits, are no further apart are of one size."""
_LOOKED_AT: Final = 64
"""Numbers of a row or column, as this training's own key chooses them: who crafts a model cannot spare those."""
_LEAST_JUDGED: Final = 4
"""Numbers that are not 0: fewer tell nothing of a row or column, unless it has no more."""
_SAMPLE: Final = 1 << 13
_SIGN: Final = np.uint32(0x7FFF_FFFF)
_SIGMA_BITS: Final = 30
_MEAN_1: Final = float(np.sqrt(np.pi / 2)) / (1 << _SIGMA_BITS)

Bits = NDArray[np.uint32]
Truths = NDArray[np.bool_]
Indices = NDArray[np.int64]
Scalar = TypeVar("Scalar", np.bool_, np.float32)


class Spread:
    """What a delta of one training is spread by. `key` is the silo's own, for this training alone: the same delta comes
    out again."""

    def __init__(self, key: bytes, share: float = 1.0) -> None:
        """`key` has 32 bytes; the sum has the delta times `share`."""
        self._elements, self._rows, self._columns = (
            _Factors(bound_key(key, purpose)) for purpose in (b"elements", b"rows", b"columns")
        )
        self._steps = StepNoise(bound_key(key, b"steps"), share)
        self._order: Callable[[int], Indices] = lru_cache(maxsize=8)(_Orders(bound_key(key, b"orders")).of)

    def noise(self, binades: FloatBlock, begin: int) -> FloatBlock:
        """What `over` is to add to the block of the delta that begins at its element `begin`: see StepNoise."""
        return self._steps.of(binades, begin)

    def over(
        self, values: FloatBlock, begin: int, tensor: TensorSpec, start: int, noise: FloatBlock | None = None
    ) -> None:
        """Add `noise` to `values`, and spread them where too many of them were alike.

        They are of `tensor`, which begins at element `start` of the delta, and their first is the delta's element
        `begin`. Numbers that are alike are spread all over; of a matrix so are its rows and columns, each for itself.
        """
        factors = list(self._factors(values, begin, tensor, start))
        if noise is not None:
            with np.errstate(invalid="ignore"):  # of values that are not finite, which end the training
                values += noise
        for each in factors:
            values *= each

    def _factors(self, values: FloatBlock, begin: int, tensor: TensorSpec, start: int) -> Iterator[FloatBlock]:
        """What to multiply `values` by; nothing where they stay as they are."""
        whole = alike(values) > MOST_ALIKE
        if len(tensor.shape) != 2 or 1 in tensor.shape:
            if whole:
                yield self._elements.where(np.ones(len(values), dtype=np.bool_), begin)
            return
        rows = _Rows(values, begin - start, tensor.shape[1])
        flat = np.ones(len(rows.counts), dtype=np.bool_) if whole else self._flat_rows(rows)
        columns = None if whole else self._flat_columns(rows, flat, least=min(_LEAST_JUDGED, tensor.shape[0]))
        if columns is None and not flat.any():
            return
        moved = np.repeat(flat, rows.counts)
        if columns is not None:
            moved |= rows.beside(columns)
        yield self._elements.where(moved, begin)
        # Rows are numbered from where their tensor begins, and so are columns: no tensor has more of them than
        # elements.
        yield np.repeat(self._rows.where(flat, start + rows.first), rows.counts)
        if columns is not None:
            yield rows.beside(self._columns.where(columns, start))

    def _flat_rows(self, rows: "_Rows") -> Truths:
        flat = np.zeros(len(rows.counts), dtype=np.bool_)
        flat[rows.uncut] = self._flat(rows.matrix)
        for row, part in rows.cut:
            # What the end of a block cut so short cannot be judged.
            flat[row] = len(part) < _LEAST_JUDGED or self._flat(part[np.newaxis])[0]
        return flat

    def _flat(self, matrix: FloatBlock) -> Truths:
        """Which rows of `matrix` are flat."""
        chosen = np.sort(self._order(matrix.shape[1])[:_LOOKED_AT])
        return flat_lines(matrix.view(np.uint32).take(chosen, axis=1) & _SIGN, least=_LEAST_JUDGED)

    def _flat_columns(self, rows: "_Rows", flat: Truths, *, least: int) -> Truths | None:
        """Which columns are flat in the rows that are whole and not flat themselves; None where there is no such
        column."""
        order = self._order(len(rows.matrix))
        chosen = np.sort(order[~flat[rows.uncut][order]][:_LOOKED_AT])
        if len(chosen) < least:
            return None
        # Rows whose lengths are powers of two would all be in the same few lines of the cache, and turning them four
        # times as slow.
        apart: Bits = np.empty((len(chosen), rows.matrix.shape[1] + 16), dtype=np.uint32)[:, :-16]
        np.bitwise_and(rows.matrix.view(np.uint32).take(chosen, axis=0), _SIGN, out=apart)
        columns = flat_lines(np.ascontiguousarray(apart.T), least=least)
        return columns if columns.any() else None


class _Factors:
    """Numbers of one law, sqrt(pi / 2) |z| of a normal z, one for each index."""

    def __init__(self, key: bytes) -> None:
        self._normal = NoiseStream(key, sigma_bits=_SIGMA_BITS)
        self._drawn: tuple[int, FloatBlock] | None = None

    def where(self, wanted: Truths, begin: int) -> FloatBlock:
        """Those of the indices from `begin` on, and 1 for those that are not `wanted`."""
        factors = np.ones(len(wanted), dtype=np.float32)
        end = begin + len(wanted)
        for block in range(begin // DRAWN_TOGETHER, -(-end // DRAWN_TOGETHER)):
            first, last = max(block * DRAWN_TOGETHER, begin), min((block + 1) * DRAWN_TOGETHER, end)
            here = slice(first - begin, last - begin)
            if wanted[here].any():
                drawn = self._block(block)[first - block * DRAWN_TOGETHER : last - block * DRAWN_TOGETHER]
                np.copyto(factors[here], drawn, where=wanted[here])
        return factors

    def _block(self, block: int) -> FloatBlock:
        """All of a block, whatever part of it is needed: fewer would be other ones. Kept for the tensor that goes on in
        it."""
        if self._drawn is None or self._drawn[0] != block:
            drawn = np.abs(self._normal.block(block, DRAWN_TOGETHER)) * _MEAN_1
            self._drawn = block, drawn.astype(np.float32)
        return self._drawn[1]


class _Orders:
    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, count: int) -> Indices:
        """0 to `count` - 1 in an order that nobody else knows."""
        words = RandomWords(bound_key(self._key, count.to_bytes(8, "big"))).words32(count)
        return np.argsort(words, kind="stable")


class _Rows:
    """The rows of a matrix `width` wide that have elements in `values`, whose first is the matrix's element `begin`."""

    def __init__(self, values: FloatBlock, begin: int, width: int) -> None:
        self.first, self._lead = divmod(begin, width)
        self._values, self._width = values, width
        rows = -(-(self._lead + len(values)) // width)
        self.counts: Indices = np.full(rows, width)
        """Elements of each row."""
        self.counts[0] -= self._lead
        self.counts[-1] -= rows * width - self._lead - len(values)
        begins = int(self.counts[0] < width)
        self.uncut = slice(begins, max(begins, rows - int(self.counts[-1] < width)))
        """Those that are whole."""

    @property
    def matrix(self) -> FloatBlock:
        """The whole rows."""
        count = self.uncut.stop - self.uncut.start
        begin = int(self.counts[0]) * self.uncut.start
        return self._values[begin : begin + count * self._width].reshape(count, self._width)

    @property
    def cut(self) -> list[tuple[int, FloatBlock]]:
        """The others, of which there are two at most, with what is there of them."""
        parts = {0: self._values[: self.counts[0]], len(self.counts) - 1: self._values[-self.counts[-1] :]}
        return [(row, part) for row, part in parts.items() if len(part) < self._width]

    def beside(self, columns: NDArray[Scalar]) -> NDArray[Scalar]:
        """`columns`, of which there is one for each column, beside the elements."""
        repeated: NDArray[Scalar] = np.tile(columns, len(self.counts))
        return repeated[self._lead :][: len(self._values)]


def alike(values: FloatBlock) -> float:
    """The largest share of the numbers that are not 0 that is of one size, of many numbers by a sample; 0.0 where all
    are 0."""
    step = len(values) // _SAMPLE | 1  # odd, so that it goes through all columns of a matrix
    sizes = values[::step].view(np.uint32) & _SIGN
    classes = np.bincount(sizes[sizes != 0] >> _SIZE_SHIFT)
    moved = int(classes.sum())
    return int((classes[:-1] + classes[1:]).max(initial=classes.max(initial=0))) / moved if moved else 0.0


def flat_lines(sizes: Bits, *, least: int) -> Truths:
    """Which rows of `sizes`, float32 without signs, have so many numbers of one size as rows of normal variables seldom
    have.

    A row with fewer than `least` numbers that are not 0 is not judged, unless it has no more. Sorts `sizes`.
    """
    sizes.sort(axis=1)
    lines, looked = sizes.shape
    if lines and sizes[:, 0].all():
        return _of_one_size(sizes)
    flat = np.zeros(lines, dtype=np.bool_)
    moved = np.count_nonzero(sizes, axis=1)
    for count in np.unique(moved[moved >= max(1, min(least, looked))]):
        (here,) = np.nonzero(moved == count)
        flat[here] = _of_one_size(sizes[here, looked - count :])
    return flat


def _of_one_size(sizes: Bits) -> Truths:
    """Of rows that are sorted."""
    count = sizes.shape[1]
    most = min(int(count * most_alike(count)) + 1, count)
    apart = sizes[:, most - 1 :] - sizes[:, : count - most + 1]
    flat: Truths = apart.min(axis=1) <= _ONE_SIZE
    return flat


def most_alike(count: int) -> float:
    """The share of `count` numbers of a row that may be of one size: the fewer they are, the more are so by chance."""
    return max(MOST_ALIKE, 0.1 + 1.8 / float(np.sqrt(count)))
