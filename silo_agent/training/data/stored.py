"""A sequence whose values are read from a spool when they are asked for."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from silo_agent.training.data.spool import Records

_Value = TypeVar("_Value", covariant=True)


class Stored(Sequence[_Value]):
    """`made` makes a value of a record; `numbers` says which record each value is, by default all in order."""

    def __init__(
        self, records: Records, made: Callable[[bytes], _Value], numbers: range | NDArray[np.int64] | None = None
    ) -> None:
        self.records, self._made = records, made
        self._in_order = numbers is None
        self._numbers = range(len(records)) if numbers is None else numbers

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> _Value: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[_Value, ...]: ...

    def __getitem__(self, index: int | slice) -> _Value | tuple[_Value, ...]:
        """Raises StorageError where the disk does not give it back. The values of a slice are all in memory."""
        if isinstance(index, slice):
            return tuple(self[one] for one in range(*index.indices(len(self))))
        return self._made(self.records[int(self._numbers[index])])

    def __iter__(self) -> Iterator[_Value]:
        if self._in_order:
            yield from map(self._made, self.records)
        else:
            yield from (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """To any sequence of equal values."""
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def stored_bytes(self, index: int) -> int:
        """Of the record of one value; nothing is read for it."""
        return self.records.length(int(self._numbers[index]))
