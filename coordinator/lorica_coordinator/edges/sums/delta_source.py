"""The spool of one silo as the numbers that reducers compute with: float32 and bfloat16 as they are, int8 as float32.

In int8 a block is checked as it arrives (silo_wire/int8_vectors); here its bytes have the digests that they had then,
and nothing of them is judged again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from lorica_coordinator.edges.sums.masked_sum import SpoolReader
from lorica_coordinator.edges.sums.next_model import Source
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.errors import IntegrityError
from lorica_security.identifiers import SiloName
from silo_wire.int8_vectors import blocks
from silo_wire.int8_vectors.sizes import BLOCK_NUMBERS, bytes_of, numbers_of
from silo_wire.manifest import UpdateDtype

_READ_NUMBERS: Final = 256 * BLOCK_NUMBERS
"""At a time: 1 MiB of float32."""


class Int8Reader:
    """An int8 spool as float32, from its first number to its last; raises UnusableUpdate naming the silo. `close` it.

    Who asks for more numbers than there are is told so by IntegrityError.
    """

    def __init__(self, silo: SiloName, vector: StoredVector) -> None:
        self._silo = silo
        self._reader = SpoolReader(silo, vector)
        self._left = numbers_of(vector.manifest.total_bytes)
        self._bytes = memoryview(bytearray(bytes_of(min(_READ_NUMBERS, self._left))))
        self._block: blocks.Floats = np.empty(BLOCK_NUMBERS, dtype=np.float32)
        self._rest = self._block[:0]
        """Of a block in which the buffer before ended."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the float32 that come next, of which there must be as many."""
        out = np.frombuffer(buffer, dtype="<f4")
        while len(out):
            if len(self._rest):
                taken = min(len(out), len(self._rest))
                out[:taken], out, self._rest = self._rest[:taken], out[taken:], self._rest[taken:]
                continue
            if len(out) > self._left:
                raise IntegrityError(
                    f"{len(out)} numbers are asked of an int8 delta of silo {self._silo} that has {self._left} left: "
                    "its spool is of another layout"
                )
            if len(out) < BLOCK_NUMBERS and len(out) < self._left:
                self._rest = self._block[: min(BLOCK_NUMBERS, self._left)]
                self._read(self._rest)
                continue
            # Whole blocks, or all that is left.
            fits = len(out) if len(out) == self._left else len(out) - len(out) % BLOCK_NUMBERS
            fits = min(fits, _READ_NUMBERS)
            self._read(out[:fits])
            out = out[fits:]

    def close(self) -> None:
        """May be repeated."""
        self._reader.close()

    def _read(self, numbers: blocks.Floats) -> None:
        data = self._bytes[: bytes_of(len(numbers))]
        self._reader.read_into(data)
        blocks.read_into(data, numbers)
        self._left -= len(numbers)


@dataclass(frozen=True, slots=True)
class DeltaForm:
    """How committed deltas are read: `open` gives a source of numbers of `dtype`."""

    dtype: torch.dtype
    open: Callable[[SiloName, StoredVector], Source]


FORMS: Final[Mapping[UpdateDtype, DeltaForm]] = {
    "float32": DeltaForm(torch.float32, SpoolReader),
    "bfloat16": DeltaForm(torch.bfloat16, SpoolReader),
    "int8": DeltaForm(torch.float32, Int8Reader),
}
