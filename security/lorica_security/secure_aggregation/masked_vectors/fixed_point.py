"""Fixed-point encoding: reals to integers mod 2^32, so that sums of masked vectors are exact.

A silo of weight w encodes, coordinate by coordinate, x = w * delta / cap. Tensor k has a public range R_k: x is clipped
to [-R_k, R_k], multiplied by levels / R_k and rounded to one of its two neighbouring integers at random, without bias.
More words follow the delta, its tail: w / cap, in range 1; the number of coordinates that were beyond their range; and
the silo's scores of the model that it trained from (`scores`). Only sums of them are ever seen.

Clipping is the last resort. A sum of clipped deltas is a grid of known numbers, beside which an unclipped one is seen.
So a silo scales a tensor that goes beyond its range down as a whole before it encodes
(silo_agent/training/update/within_range.py), and nothing is clipped here.

Overflow is impossible, not unlikely: |integer| <= levels + 1 (one for the rounding) and the constructor of FixedPoint
refuses unless cohort * (levels + 1) <= 2^31 - 1, so a sum of `cohort` of them read as a signed word is the sum over the
integers; likewise cohort * saturation_limit <= 2^32 - 1 for the counts.

Ranges are constants of a plan (`silo_wire.plans.masked_ranges`), so what a silo puts into a sum follows from its own
delta and weight.

Error: the rounding of one silo adds at most half a level to the standard deviation of a coordinate, so a tensor's sum
over n silos is off by at most sqrt(n) / 2 * R_k / levels in root mean square.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lorica_security.errors import ConfigurationError, MalformedMessage, StateError
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, Words
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES, SCORE_WORDS, Scores
from lorica_security.secure_aggregation.transcript import Part

if sys.byteorder != "little":
    raise ImportError("secure aggregation needs a little-endian processor: vectors travel as little-endian words")

FloatBlock = NDArray[np.float32]
WideBlock = NDArray[np.float64]
WholeBlock = NDArray[np.int32]

SIGNED_MAX = 2**31 - 1
UNSIGNED_MAX = 2**32 - 1
LEAST_LEVELS = 1 << 16
"""Below this many levels an aggregate's error is visible: the cohort is too large for 32-bit words."""
SMALLEST_BOUND, LARGEST_BOUND = 2.0**-200, 2.0**200
MAX_ELEMENTS = 1 << 38

EXTRA_WORDS = 2 + SCORE_WORDS
"""Behind the delta: the weight, the count of saturated coordinates, the scores."""

BLOCK_ELEMENTS = 1 << 15
_FINE = 2.0**32
"""Values are rounded in units of 2^-32, in which the random words are whole numbers: one multiplication less."""
_ROUND = 1.5 * 2.0**52 * _FINE
"""Added to such a value below 2^51, leaves the nearest integer, mod 2^32, in the low word of the double."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """`elements` consecutive coordinates, of which |w * delta / cap| is at most `bound`."""

    elements: int
    bound: float

    def __post_init__(self) -> None:
        if type(self.elements) is not int or not 1 <= self.elements <= MAX_ELEMENTS:
            raise MalformedMessage(f"tensor range has {self.elements} elements: allowed are 1 to {MAX_ELEMENTS}")
        _check_bound("tensor range bound", self.bound)


def _check_bound(name: str, value: float) -> None:
    if type(value) is not float or not SMALLEST_BOUND <= value <= LARGEST_BOUND:
        raise MalformedMessage(f"{name} is {value}: allowed are {SMALLEST_BOUND:g} to {LARGEST_BOUND:g}")


def _between(least: float, value: float, most: float) -> float:
    return min(max(value, least), most)


@dataclass(frozen=True)
class Ranges:
    """What numbers can be expressed in a round, whatever the size of its cohort; public."""

    weight_cap: float
    tensors: tuple[TensorRange, ...]

    def __post_init__(self) -> None:
        _check_bound("weight cap", self.weight_cap)
        if not self.tensors:
            raise MalformedMessage("ranges name no tensor: a model has at least one")

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each tensor begins, then where the last one ends."""
        starts = [0]
        for tensor in self.tensors:
            starts.append(starts[-1] + tensor.elements)
        return tuple(starts)

    @property
    def elements(self) -> int:
        return self.starts[-1]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(tensor.elements for tensor in self.tensors)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(tensor, first, last + 1) of each stretch of coordinates [start, stop) that lies in one tensor."""
        index = bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[index + 1])
            yield index, start, end
            start, index = end, index + 1

    @classmethod
    def of(cls, *, sizes: Sequence[int], largest_delta: Sequence[float], largest_weight: float) -> "Ranges":
        """From bounds per tensor on |delta|, and on the weight."""
        tensors = tuple(
            TensorRange(size, _between(SMALLEST_BOUND, float(bound), LARGEST_BOUND))
            for size, bound in zip(sizes, largest_delta, strict=True)
        )
        return cls(weight_cap=_between(SMALLEST_BOUND, float(largest_weight), LARGEST_BOUND), tensors=tensors)


@dataclass(frozen=True, kw_only=True)
class FixedPoint:
    """The encoding of one cohort; a value that exists cannot overflow. Raises MalformedMessage otherwise."""

    cohort: int
    levels: int
    saturation_limit: int
    ranges: Ranges

    def __post_init__(self) -> None:
        if self.cohort < 1 or self.levels < LEAST_LEVELS:
            raise MalformedMessage(
                f"fixed point has {self.levels} levels for {self.cohort} silos: at least {LEAST_LEVELS} are needed, "
                "take a smaller cohort"
            )
        if self.cohort * (self.levels + 1) > SIGNED_MAX:
            raise MalformedMessage(
                f"fixed point of {self.levels} levels can overflow in a sum of {self.cohort} silos: "
                f"at most {SIGNED_MAX // self.cohort - 1} levels are safe"
            )
        if self.saturation_limit < 1 or self.cohort * self.saturation_limit > UNSIGNED_MAX:
            raise MalformedMessage(
                f"saturation limit {self.saturation_limit} can overflow in a sum of {self.cohort} silos: "
                f"at most {UNSIGNED_MAX // self.cohort} is safe"
            )

    @classmethod
    def of(cls, *, cohort: int, ranges: Ranges) -> "FixedPoint":
        """The finest encoding that is safe for `cohort` silos."""
        if cohort < 1:
            raise ConfigurationError(f"a cohort of {cohort} silos: at least one is needed")
        return cls(
            cohort=cohort,
            levels=SIGNED_MAX // cohort - 1,
            saturation_limit=UNSIGNED_MAX // cohort,
            ranges=ranges,
        )

    @property
    def words(self) -> int:
        """Length of an encoded vector: the delta and its tail."""
        return self.ranges.elements + EXTRA_WORDS

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the roster digest covers."""
        tensors = tuple((tensor.elements, tensor.bound) for tensor in self.ranges.tensors)
        return (self.cohort, self.levels, self.saturation_limit, self.ranges.weight_cap, tensors)


class Workspace:
    """Buffers for one thread at a time; `erase` when done."""

    __slots__ = ("drawn", "noise", "stream", "wide")

    def __init__(self) -> None:
        self.stream = mask_stream.Workspace()
        self.drawn: Words = np.zeros(BLOCK_ELEMENTS, dtype="<u4")
        self.wide: WideBlock = np.zeros(BLOCK_ELEMENTS, dtype=np.float64)
        self.noise: WideBlock = np.zeros(BLOCK_ELEMENTS, dtype=np.float64)

    def erase(self) -> None:
        self.stream.erase()
        for buffer in (self.drawn, self.wide, self.noise):
            buffer.fill(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """One silo's encoding: the same bytes whenever it is run, since the rounding comes from an addressable stream.

    `unit` is what a 1 of the vector that is encoded stands for.
    """

    fixed_point: FixedPoint
    weight: float
    rounding: KeyStream
    scores: Scores = NO_SCORES
    unit: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or self.weight < 0:
            raise StateError(f"weight {self.weight} cannot be encoded: it must be finite and not negative")

    @property
    def capped_weight(self) -> float:
        """The weight that this silo takes part with, in its delta and in the sum of weights alike."""
        return min(self.weight, self.fixed_point.ranges.weight_cap)

    def scale(self, tensor: int) -> float:
        """How many levels a number of 1 comes to in the delta's tensor of that index. What comes to more than all
        levels is beyond its range."""
        ranges = self.fixed_point.ranges
        return (
            self.capped_weight / ranges.weight_cap * self.fixed_point.levels / ranges.tensors[tensor].bound * self.unit
        )

    def encode(self, out: Words, delta: FloatBlock | WholeBlock, start: int, workspace: Workspace) -> int:
        """Write coordinates [start, start + len(delta)) into `out`; the number of them that had to be clipped.

        Raises StateError for a delta that is not finite.
        """
        if len(out) != len(delta) or start + len(delta) > self.fixed_point.ranges.elements:
            raise ValueError(f"coordinates {start} to {start + len(delta)} do not fit {len(out)} words")
        ranges, levels = self.fixed_point.ranges, self.fixed_point.levels
        rounding = self.rounding.opened(start, len(delta), workspace.stream)
        saturated = 0
        for block in range(0, len(delta), BLOCK_ELEMENTS):
            size = min(BLOCK_ELEMENTS, len(delta) - block)
            mask_stream.expand(rounding, workspace.drawn[:size], workspace.stream)
            at = start + block
            for tensor, first, last in ranges.pieces(at, at + size):
                here = slice(first - start, last - start)
                drawn = workspace.drawn[first - at : last - at]
                saturated += _encode(out[here], delta[here], drawn, self.scale(tensor), levels, workspace)
        return saturated

    def public_tail(self) -> Words:
        """The tail where it may tell nothing of this silo: a weight of the cap, no coordinate beyond its range, no
        scores."""
        return np.array([self.fixed_point.levels, 0, *NO_SCORES.words], dtype="<u4")

    def encode_tail(self, saturated: int, workspace: Workspace) -> Words:
        """The tail: the weight; the count of coordinates beyond their range, to which a weight above the cap adds one;
        the scores."""
        ranges, levels = self.fixed_point.ranges, self.fixed_point.levels
        out: Words = np.zeros(EXTRA_WORDS, dtype="<u4")
        drawn: Words = np.zeros(1, dtype="<u4")
        self.rounding.words_into(drawn, ranges.elements, workspace.stream)
        share: WideBlock = np.array([self.capped_weight / ranges.weight_cap * levels * _FINE], dtype=np.float64)
        _round(out[:1], share, drawn, workspace)
        limit = self.fixed_point.saturation_limit
        out[1] = min(saturated + (self.weight > ranges.weight_cap), limit)
        out[2:] = self.scores.capped(limit).words
        return out


def _encode(
    out: Words, delta: FloatBlock | WholeBlock, drawn: Words, scale: float, levels: int, workspace: Workspace
) -> int:
    peak = max(float(delta.max()), -float(delta.min()))  # NaN wins in either
    if not math.isfinite(peak):
        raise StateError("the delta has a coordinate that is not finite: nothing of it may leave")
    wide = workspace.wide[: len(delta)]
    np.copyto(wide, delta)
    np.multiply(wide, scale * _FINE, out=wide)
    saturated = 0
    if peak * scale > levels:
        saturated = int(np.count_nonzero(np.abs(wide) > levels * _FINE))
        np.clip(wide, -levels * _FINE, levels * _FINE, out=wide)
    _round(out, wide, drawn, workspace)
    return saturated


def _round(out: Words, wide: WideBlock, drawn: Words, workspace: Workspace) -> None:
    """The integers that `wide`, in units of 2^-32 and overwritten, rounds to: nearest to value + uniform in [-1/2,
    1/2)."""
    noise = workspace.noise[: len(wide)]
    np.copyto(noise, drawn.view("<i4"))
    np.add(wide, noise, out=wide)
    np.add(wide, _ROUND, out=wide)
    np.copyto(out, wide.view("<u8"), casting="unsafe")


@dataclass(frozen=True, slots=True, kw_only=True)
class SumTail:
    """What the tail of a sum says. `scores` is None where it contradicts itself: some silo did not tell the truth."""

    weight_sum: float
    saturated: int
    scores: Scores | None


def decode_tail(fixed_point: FixedPoint, words: Words) -> SumTail:
    """The sums of the weights, of the coordinates beyond their range (at least; a silo's count has a limit), of the
    scores."""
    if len(words) != EXTRA_WORDS:
        raise ValueError(f"{len(words)} words at the end of a sum: expected {EXTRA_WORDS}")
    weight = int(words[:1].view("<i4")[0])
    questions, exact_matches, executed, execution_matches, loss = (int(word) for word in words[2:])
    try:
        scores = Scores(
            questions=questions,
            exact_matches=exact_matches,
            executed=executed,
            execution_matches=execution_matches,
            loss=loss,
        )
    except MalformedMessage:
        scores = None
    return SumTail(
        weight_sum=max(weight, 0) * fixed_point.ranges.weight_cap / fixed_point.levels,
        saturated=int(words[1]),
        scores=scores,
    )


def averaged(fixed_point: FixedPoint, weight_sum: float) -> FixedPoint:
    """As which a sum decodes to the mean of the deltas at once, rounded once: the cap as a share of `weight_sum`, above
    zero."""
    ranges = fixed_point.ranges
    return replace(fixed_point, ranges=replace(ranges, weight_cap=ranges.weight_cap / weight_sum))


def decode(fixed_point: FixedPoint, words: Words, start: int, out: NDArray[np.floating]) -> None:
    """Coordinates [start, start + len(words)) of the sum of w * delta, in float32 or float64."""
    ranges = fixed_point.ranges
    for tensor, first, last in ranges.pieces(start, start + len(words)):
        unit = ranges.tensors[tensor].bound / fixed_point.levels * ranges.weight_cap
        here = slice(first - start, last - start)
        np.multiply(words[here].view("<i4"), unit, out=out[here], dtype=np.float64, casting="same_kind")
