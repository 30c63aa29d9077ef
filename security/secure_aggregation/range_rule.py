"""What ranges a roster may have, by what a silo knows for itself: the plan's constants, and the ranges that it saw last.

Ranges follow from the last public sum (`Ranges.after`), which moves them by so much in one round and no more:

- the cap on weights by `weight_ratio` in either direction: every weight is within [cap / ratio^2, cap], their mean with them,
  and the next cap is ratio times that mean;
- the largest |w * delta| of a tensor, its bound times the cap, by HEADROOM up, and down to HEADROOM of MOST_LEVELS.

A round that this silo did not see is one move more. Within a round nothing moves: a second attempt has the ranges of the first.
A silo that has seen none counts from the plan's first round, whose ranges are the plan's constants.

Ranges far below what deltas have would leave nothing of them but their signs, ranges far above it nothing at all.
"""

import math
from dataclasses import dataclass
from typing import Final

from security.errors import PolicyRefusal
from security.secure_aggregation.fixed_point import HEADROOM, LARGEST_RANGE, LEAST_RANGE, MOST_LEVELS, Ranges

RANGES: Final = "ranges"
SLACK: Final = 2.0**-40
"""In powers of two for each move: more than the rounding of a few products of doubles comes to."""
_REMEDY: Final = (
    "this silo masks nothing by them; have the operator make a new plan, or, where the coordinator was restored from a backup, "
    "wait for later rounds"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenRanges:
    """Of the last roster that this silo dealt to in a plan."""

    round: int
    ranges: Ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRule:
    """`first` are the ranges of the first round, `weight_ratio` is the plan's max_weight_ratio."""

    first: Ranges
    weight_ratio: float

    def check(self, offered: Ranges, *, round_number: int, seen: SeenRanges | None) -> None:
        """Raise PolicyRefusal for ranges that no sums can have led to. Raises ValueError for another number of tensors."""
        last = seen or SeenRanges(round=1, ranges=self.first)
        moves = round_number - last.round
        since = f"round {last.round}" if seen else "the plan's first round"
        if moves <= 0:
            if offered != last.ranges:
                raise PolicyRefusal(
                    RANGES, f"the roster of round {round_number} has other ranges than {since}: {_REMEDY}"
                )
            return
        cap, cap_before = offered.weight_cap, last.ranges.weight_cap
        _check_size("cap on weights", cap)
        _check_move(
            "cap on weights", cap, cap_before, since, moves, least=1 / self.weight_ratio, most=self.weight_ratio
        )
        for index, (tensor, before) in enumerate(zip(offered.tensors, last.ranges.tensors, strict=True)):
            what = f"range of tensor {index}"
            _check_size(what, tensor.bound)
            _check_move(
                f"{what}, times that cap,",
                tensor.bound * cap,
                before.bound * cap_before,
                since,
                moves,
                least=HEADROOM / MOST_LEVELS,
                most=HEADROOM,
            )


def _check_size(what: str, value: float) -> None:
    if not LEAST_RANGE <= value <= LARGEST_RANGE:
        raise PolicyRefusal(
            RANGES,
            f"the roster's {what} is {value:.3g}, sums lead to {LEAST_RANGE:.3g} to {LARGEST_RANGE:.3g}: {_REMEDY}",
        )


def _check_move(what: str, now: float, before: float, since: str, moves: int, *, least: float, most: float) -> None:
    moved = math.log2(now / before)
    lowest, highest = moves * (math.log2(least) - SLACK), moves * (math.log2(most) + SLACK)
    if not lowest <= moved <= highest:
        raise PolicyRefusal(
            RANGES,
            f"the roster's {what} is {now:.3g} and was {before:.3g} in {since}: {moves} rounds move it by 2^{lowest:.1f} to "
            f"2^{highest:.1f}, this is 2^{moved:.1f}; {_REMEDY}",
        )
