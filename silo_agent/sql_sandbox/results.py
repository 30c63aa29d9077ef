"""What a query may cost, what it gives back, and how it fails."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum

from lorica_security.errors import ConfigurationError, DataError, LoricaError, UnsafeSql

Value = None | bool | int | float | str
Row = tuple[Value, ...]

# Larger whole numbers (PostgreSQL's numeric has them) are given as floats.
MOST_WHOLE = 10**30
_NUMBER_BYTES = 8


class QueryFailed(DataError):
    """The database was asked and could not run the statement (no such column, a syntax error, a division by zero)."""


class JailMissing(DataError):
    """A wall of the jail is demanded and not there on this machine, or is there and does not stand."""


class Stale(DataError):
    """What this worker was let to reach is no longer the database: files beside it came or went, or the server closed
    the connection."""


ERRORS: dict[str, type[LoricaError]] = {
    "refused": UnsafeSql,
    "failed": QueryFailed,
    "jail": JailMissing,
    "stale": Stale,
    "database": DataError,
}
"""What the worker may answer instead of rows; the first that an error is one of is its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one statement: wall-clock seconds, rows, bytes of all values together, bytes of memory of the worker.

    `memory_bytes` comes on top of what the worker's own code takes. `require_jail`: no statement where a wall of the
    jail is missing.
    """

    seconds: float = 5.0
    rows: int = 10_000
    result_bytes: int = 4 * 2**20
    memory_bytes: int = 256 * 2**20
    require_jail: bool = False

    def __post_init__(self) -> None:
        if not 0.01 <= self.seconds <= 3600:
            raise ConfigurationError(f"SQL time limit {self.seconds} s is not within 0.01 to 3600")
        for name, value, least, most in (
            ("row limit", self.rows, 1, 10**7),
            ("result limit in bytes", self.result_bytes, 2**10, 2**28),
            ("memory limit in bytes", self.memory_bytes, 2**25, 2**40),
        ):
            if not least <= value <= most:
                raise ConfigurationError(f"SQL {name} {value} is not within {least} to {most}")


class ResultKind(Enum):
    """How much a result says: a prediction meets an EMPTY or NULL_OR_ZERO gold result easily by accident."""

    ROWS = "rows"
    EMPTY = "empty"
    NULL_OR_ZERO = "null_or_zero"


@dataclass(frozen=True, slots=True)
class Rows:
    """A complete result in canonical values; `ordered` says that the statement had an ORDER BY at its top level."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    ordered: bool = False

    @property
    def kind(self) -> ResultKind:
        if not self.rows:
            return ResultKind.EMPTY
        if len(self.rows) == 1 and len(self.rows[0]) == 1 and self.rows[0][0] in (None, 0):
            return ResultKind.NULL_OR_ZERO
        return ResultKind.ROWS


def canonical(value: object) -> Value:
    r"""`value` as JSON has it, the same for SQLite and PostgreSQL.

    Blobs become `\x` and hex digits; whole decimals integers, others floats; what JSON cannot say (NaN, infinities,
    decimals beyond a float) its name or digits as text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _name_of(value)
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, Decimal):
        if not value.is_finite():
            return _name_of(float(value))
        if abs(value) < MOST_WHOLE:
            return int(value) if value == value.to_integral_value() else float(value)
        return float(value) if math.isfinite(float(value)) else str(value)
    return str(value)


def _name_of(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


class RowCollector:
    """Gathers rows in canonical values and raises UnsafeSql as soon as one is too many or too large."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bytes = 0
        self.rows: list[Row] = []

    def add(self, rows: Iterable[Iterable[object]]) -> None:
        for row in rows:
            if len(self.rows) == self._limits.rows:
                raise UnsafeSql(f"SQL stopped: its result has more than {self._limits.rows} rows (limit rows)")
            converted = tuple(canonical(value) for value in row)
            self._bytes += sum(map(_size, converted))
            if self._bytes > self._limits.result_bytes:
                raise UnsafeSql(
                    f"SQL stopped: its result exceeds {self._limits.result_bytes} bytes (limit result_bytes)"
                )
            self.rows.append(converted)


def _size(value: Value) -> int:
    return max(_NUMBER_BYTES, len(value.encode())) if isinstance(value, str) else _NUMBER_BYTES
