"""Mask streams: AES-256-CTR keystream as 32-bit words, addressable at any word, added mod 2^32.

A key is used for one stream of one attempt, so the counter begins at zero and no nonce is needed. The stream is
expanded and added in blocks of BLOCK_WORDS that stay in the second-level cache. Both the cipher and the addition
release the GIL: a caller with two cores gives the two halves of a vector to two threads, each with a Workspace of its
own. Long stretches come by the faster of two ways to the same words (counter_mode.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import CipherContext
from numpy.typing import NDArray

from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.counter_mode import BLOCK_BYTES, Nonces, by_ctr, gcm_reaches

Words = NDArray[np.uint32]
"""Little-endian unsigned 32-bit numbers; sums wrap around."""

KEY_BYTES = 32
BLOCK_WORDS = 1 << 16
"""256 KiB: vector, keystream and the zeros it is made from fit into the second-level cache together."""
LONG_WORDS = 1 << 16
"""From here on the way by GCM pays."""
WORDS_PER_COUNTER = BLOCK_BYTES // 4


class Workspace:
    """Buffers for one thread at a time, and what it found out about the streams that it opened; `erase` when done."""

    __slots__ = ("_nonces", "words", "zeros")

    def __init__(self) -> None:
        self.zeros = bytes(BLOCK_WORDS * 4)
        self.words: Words = np.zeros(BLOCK_WORDS, dtype="<u4")
        self._nonces: dict[int, tuple[Secret, Nonces]] = {}

    def nonces(self, key: Secret) -> Nonces:
        found = self._nonces.get(id(key))
        if found is None:
            found = self._nonces[id(key)] = key, Nonces(key.buffer)
        return found[1]

    def erase(self) -> None:
        self.words.fill(0)
        for _, nonces in self._nonces.values():
            nonces.erase()
        self._nonces.clear()


@dataclass(frozen=True, slots=True)
class KeyStream:
    """The keystream of one 32-byte key."""

    key: Secret

    def opened(self, start: int, count: int, workspace: Workspace) -> CipherContext:
        """The cipher, about to give `count` words from word `start` on."""
        counter, skipped = divmod(start, WORDS_PER_COUNTER)
        if count >= LONG_WORDS and gcm_reaches(counter, -(-(skipped + count) // WORDS_PER_COUNTER)):
            context = workspace.nonces(self.key).by_gcm(self.key.buffer, counter)
        else:
            context = by_ctr(self.key.buffer, counter)
        if skipped:
            context.update(bytes(4 * skipped))
        return context

    def words_into(self, out: Words, start: int, workspace: Workspace) -> None:
        """Write words [start, start + len(out)) of the stream into `out`."""
        context = self.opened(start, len(out), workspace)
        for position in range(0, len(out), BLOCK_WORDS):
            piece = out[position : position + BLOCK_WORDS]
            expand(context, piece, workspace)

    def erase(self) -> None:
        self.key.erase()


def expand(context: CipherContext, out: Words, workspace: Workspace) -> None:
    """The next `len(out)` words, at most BLOCK_WORDS, of an opened stream."""
    if len(out):
        context.update_into(memoryview(workspace.zeros)[: len(out) * 4], out.view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class MaskSum:
    """A signed sum of streams: what a silo adds to its encoded vector, or the coordinator to the sum of masked
    vectors."""

    added: tuple[KeyStream, ...]
    subtracted: tuple[KeyStream, ...]

    def opened(self, start: int, count: int, workspace: Workspace) -> "OpenedSum":
        """The sum from word `start` on, for `count` words that are asked for one after the other."""
        return OpenedSum(
            [stream.opened(start, count, workspace) for stream in self.added],
            [stream.opened(start, count, workspace) for stream in self.subtracted],
            workspace,
        )

    def apply(self, words: Words, start: int, workspace: Workspace) -> None:
        """Add words [start, start + len(words)) of the sum to `words`, in place, mod 2^32."""
        self.opened(start, len(words), workspace).apply(words)

    def erase(self) -> None:
        for stream in (*self.added, *self.subtracted):
            stream.erase()


class OpenedSum:
    """A signed sum of streams that is read on from where it was left."""

    __slots__ = ("_added", "_subtracted", "_workspace")

    def __init__(
        self, added: Sequence[CipherContext], subtracted: Sequence[CipherContext], workspace: Workspace
    ) -> None:
        self._added, self._subtracted, self._workspace = added, subtracted, workspace

    def apply(self, words: Words) -> None:
        """Add the next words of the sum to `words`, in place, mod 2^32."""
        for position in range(0, len(words), BLOCK_WORDS):
            piece = words[position : position + BLOCK_WORDS]
            stream = self._workspace.words[: len(piece)]
            for context in self._added:
                expand(context, stream, self._workspace)
                np.add(piece, stream, out=piece)
            for context in self._subtracted:
                expand(context, stream, self._workspace)
                np.subtract(piece, stream, out=piece)
