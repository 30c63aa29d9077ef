"""Which names stand twice, and which lines are of one unit, in memory that is a few bytes for each.

Names are compared by 64-bit hashes first, and then themselves where these are equal. Units are told apart by 128 bits
of BLAKE3: to make two that fall together takes some 2^64 tries, and by chance none do.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

_KEY_BYTES: Final = 16
_Whole = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Names:
    """`hashes` of all, in order; `name` gives one by its number."""

    hashes: _Whole
    name: Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The name `number` is one that stands before: `first` of the Names at `among`, which may be the same."""

    number: int
    among: int
    first: int


def repeats(names: Names, before: Sequence[Names]) -> Iterator[Repeat]:
    """Of each name that stands in `before` or earlier in `names`, in no order. Takes 40 bytes of memory a name while it
    looks."""
    order = np.argsort(names.hashes, kind="stable")
    hashes = names.hashes[order]
    among = [*before, names]
    suspect = np.zeros(len(hashes), dtype=np.bool_)
    suspect[1:] |= hashes[1:] == hashes[:-1]
    suspect[:-1] |= suspect[1:]
    for others in before:
        suspect |= np.isin(hashes, others.hashes)
    ours, of_ours = order[suspect], hashes[suspect]
    theirs = [_with(others.hashes, of_ours) for others in before]
    del order, hashes, suspect
    ends = np.flatnonzero(np.append(of_ours[1:] != of_ours[:-1], True)) + 1 if len(of_ours) else ()
    begin = 0
    for end in map(int, ends):
        firsts: dict[str, tuple[int, int]] = {}
        for index, (numbers, of_theirs) in enumerate(theirs):
            left, right = (int(np.searchsorted(of_theirs, of_ours[begin], side)) for side in ("left", "right"))
            for number in numbers[left:right].tolist():
                firsts.setdefault(among[index].name(number), (index, number))
        for number in ours[begin:end].tolist():
            first = firsts.setdefault(names.name(number), (len(before), number))
            if first != (len(before), number):
                yield Repeat(number, *first)
        begin = end


def _with(hashes: _Whole, wanted: _Whole) -> tuple[_Whole, _Whole]:
    """The numbers of those that are `wanted`, by their hashes, and these."""
    found = np.flatnonzero(np.isin(hashes, wanted))
    found = found[np.argsort(hashes[found], kind="stable")]
    return found, hashes[found]


class Units(Sequence[tuple[int, ...]]):
    """The numbers of each one to whom some belong, ascending, in the order in which units come up first; 16 bytes a
    number."""

    def __init__(self, numbers: _Whole, begins: _Whole) -> None:
        """`numbers` unit by unit; `begins` where each unit's begin, and their end."""
        self._numbers, self._begins = numbers, begins

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, unit: int) -> tuple[int, ...]:  # type: ignore[override]  # no slices
        if not 0 <= unit < len(self):
            raise IndexError(unit)
        return tuple(self._numbers[self._begins[unit] : self._begins[unit + 1]].tolist())

    def largest(self) -> int:
        """The first of those that have most."""
        return int(np.argmax(np.diff(self._begins)))


class UnitKeys:
    """Collects whose each line is."""

    def __init__(self) -> None:
        self._keys, self._named = bytearray(), False

    def append(self, unit: str) -> None:
        self._named = self._named or bool(unit)
        self._keys += blake3(unit.encode("utf-8", "surrogatepass")).digest(length=_KEY_BYTES)

    def units(self) -> Units | None:
        """None where every line is a unit by itself. Takes 64 bytes of memory a line while it looks."""
        if not self._named:
            return None
        keys = np.frombuffer(self._keys, dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((keys[:, 1], keys[:, 0]))
        ordered = keys[order]
        begins = np.flatnonzero(np.append(True, (ordered[1:] != ordered[:-1]).any(axis=1)))
        sizes = np.diff(np.append(begins, len(order)))
        by_first = np.argsort(order[begins], kind="stable")  # lexsort is stable: the first of a group is its least
        ends = np.cumsum(sizes[by_first])
        moved = np.repeat(begins[by_first] - (ends - sizes[by_first]), sizes[by_first])
        return Units(order[moved + np.arange(len(order))], np.append(0, ends))


def whole_numbers(of: "array[int]") -> _Whole:
    """An array of type q, without a copy."""
    return np.asarray(of, dtype=np.int64)
