"""Execution accuracy: whether a predicted query gives the gold query's result.

Results are compared as multisets of rows, or in order where the gold query has an ORDER BY at its top level. Column
names do not count, column positions do. Integers are compared exactly, numbers of which one is a fraction with a
tolerance.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from lorica_security.errors import UnsafeSql
from silo_agent.sql_sandbox.results import QueryFailed, ResultKind, Row, Rows, Value
from silo_agent.sql_sandbox.sandbox import Sandbox

RELATIVE_TOLERANCE = 1e-9
ABSOLUTE_TOLERANCE = 1e-12
# Above this many rows that agree but for several inexact numbers, only their sorted order is tried.
_MATCHED_ROWS = 200


class ExecutionOutcome(Enum):
    """What became of one (gold, predicted) pair. Refused: unsafe, or stopped at a limit."""

    MATCH = "match"
    MISMATCH = "mismatch"
    PREDICTED_ERROR = "predicted_error"
    PREDICTED_REFUSED = "predicted_refused"
    GOLD_ERROR = "gold_error"


@dataclass(frozen=True, slots=True)
class ExecutionMatch:
    """An outcome, with what the gold query gave (None at GOLD_ERROR) and the reason where a query did not run."""

    outcome: ExecutionOutcome
    gold: ResultKind | None
    reason: str = ""


def execution_match(box: Sandbox, *, gold_sql: str, predicted_sql: str) -> ExecutionMatch:
    """Run both in `box` and compare. DataError (the database is out of reach) is the caller's to handle, not an
    outcome."""
    try:
        gold = box.run(gold_sql)
    except (UnsafeSql, QueryFailed) as error:
        return ExecutionMatch(ExecutionOutcome.GOLD_ERROR, None, str(error))
    try:
        predicted = box.run(predicted_sql)
    except UnsafeSql as error:
        return ExecutionMatch(ExecutionOutcome.PREDICTED_REFUSED, gold.kind, str(error))
    except QueryFailed as error:
        return ExecutionMatch(ExecutionOutcome.PREDICTED_ERROR, gold.kind, str(error))
    same = same_result(gold, predicted, ordered=gold.ordered)
    return ExecutionMatch(ExecutionOutcome.MATCH if same else ExecutionOutcome.MISMATCH, gold.kind)


def same_result(gold: Rows, predicted: Rows, *, ordered: bool) -> bool:
    """Whether both hold the same rows: in the same order if `ordered`, else each as often. Two empty results are the
    same."""
    if len(gold.rows) != len(predicted.rows):
        return False
    if not gold.rows:
        return True
    if len(gold.rows[0]) != len(predicted.rows[0]):
        return False
    if ordered:
        return all(map(_same_row, gold.rows, predicted.rows))
    return _same_multiset(gold.rows, predicted.rows)


def _same_multiset(gold: Sequence[Row], predicted: Sequence[Row]) -> bool:
    left, right = Counter(gold), Counter(predicted)
    left, right = left - right, right - left
    if not left:
        return True
    # What is left differs at least in the last digits of some number: compare within groups that agree elsewhere.
    inexact = {i for row in [*left, *right] for i, value in enumerate(row) if _is_fraction(value)}

    def key(row: Row) -> tuple[Value | type[float], ...]:
        return tuple(float if i in inexact and _is_number(value) else value for i, value in enumerate(row))

    groups_left, groups_right = _grouped(left, key), _grouped(right, key)
    if groups_left.keys() != groups_right.keys():
        return False
    return all(_same_group(groups_left[k], groups_right[k], sorted(inexact)) for k in groups_left)


def _grouped(rows: Counter[Row], key: Callable[[Row], object]) -> dict[object, list[Row]]:
    groups = defaultdict(list)
    for row in rows.elements():
        groups[key(row)].append(row)
    return groups


def _same_group(left: list[Row], right: list[Row], inexact: list[int]) -> bool:
    """Whether rows that agree outside `inexact` can be paired within the tolerance."""
    if len(left) != len(right):
        return False

    def numbers(row: Row) -> tuple[float, ...]:
        return tuple(value for i in inexact if isinstance(value := row[i], int | float))

    if all(map(_same_row, sorted(left, key=numbers), sorted(right, key=numbers))):
        return True
    return len(left) <= _MATCHED_ROWS and _pairs_up(left, right)


def _pairs_up(left: list[Row], right: list[Row]) -> bool:
    """Whether a perfect matching exists (Kuhn's augmenting paths): noise in one column can upset the order by
    another."""
    candidates = [[j for j, row in enumerate(right) if _same_row(mine, row)] for mine in left]
    owner: dict[int, int] = {}

    def place(i: int, tried: set[int]) -> bool:
        for j in candidates[i]:
            if j not in tried:
                tried.add(j)
                if j not in owner or place(owner[j], tried):
                    owner[j] = i
                    return True
        return False

    return all(place(i, set()) for i in range(len(left)))


def _same_row(gold: Row, predicted: Row) -> bool:
    return len(gold) == len(predicted) and all(map(_same_value, gold, predicted))


def _same_value(gold: Value, predicted: Value) -> bool:
    if gold == predicted:
        return True
    if (
        isinstance(gold, int | float)
        and isinstance(predicted, int | float)
        and (_is_fraction(gold) or _is_fraction(predicted))
    ):
        return math.isclose(gold, predicted, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)
    return False


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float)


def _is_fraction(value: Value) -> bool:
    return isinstance(value, float) and not value.is_integer()
