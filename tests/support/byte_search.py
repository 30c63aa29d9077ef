"""Whether any of many byte strings is in a file, as it is or in base64, wherever in it."""

from base64 import b64encode
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

_HEAD = 8
_TABLE_BITS = 24


def _in_base64(data: bytes) -> Iterator[bytes]:
    """What base64 shows of `data`, at each of the three places that it can have in a longer string."""
    for before, skipped in ((0, 0), (1, 2), (2, 3)):
        yield b64encode(bytes(before) + data)[skipped : (before + len(data)) * 8 // 6]


class Needles:
    """Byte strings of at least 16 bytes."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        self._of: dict[bytes, list[tuple[bytes, bytes]]] = {}
        for needle in set(needles):
            for form in (needle, *_in_base64(needle)):
                self._of.setdefault(form[:_HEAD], []).append((form, needle))
        heads = np.frombuffer(b"".join(self._of), dtype="<u8")
        self._table = np.zeros(1 << _TABLE_BITS, dtype=bool)
        self._table[_short(heads)] = True

    def in_file(self, path: Path) -> set[bytes]:
        """Which of them the file holds; none of one that is gone."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return set()
        found = set()
        for shift in range(_HEAD):
            count = (len(content) - shift) // _HEAD
            if count <= 0:
                break
            windows = np.frombuffer(content, dtype="<u8", count=count, offset=shift)
            for index in np.flatnonzero(self._table[_short(windows)]):
                at = shift + int(index) * _HEAD
                for form, needle in self._of.get(content[at : at + _HEAD], ()):
                    if content.startswith(form, at):
                        found.add(needle)
        return found

    def below(self, folder: Path) -> dict[str, set[bytes]]:
        """By file below `folder`, those that hold any."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): found for path in files if (found := self.in_file(path))}


def _short(heads: "np.ndarray") -> "np.ndarray":
    """24 bits of each, of all its bytes."""
    return (heads * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - _TABLE_BITS)
