"""Mask streams: AES-256-CTR keystream as 32-bit words, addressable at any word, added mod 2^32.

A key is used for one stream of one attempt, so the counter begins at zero and no nonce is needed. The stream is expanded
and added in blocks of BLOCK_WORDS that stay in the second-level cache. Both the cipher and the addition release the GIL:
a caller with two cores gives the two halves of a vector to two threads, each with a Workspace of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from numpy.typing import NDArray

from security.secure_aggregation.secret import Secret

Words = NDArray[np.uint32]
"""Little-endian unsigned 32-bit numbers; sums wrap around."""

KEY_BYTES = 32
BLOCK_WORDS = 1 << 16
"""256 KiB: vector, keystream and the zeros it is made from fit into the second-level cache together."""
WORDS_PER_COUNTER = 4


class Workspace:
    """Buffers for one thread at a time; `erase` when done, since a keystream is a secret."""

    __slots__ = ("words", "zeros")

    def __init__(self) -> None:
        self.zeros = bytes(BLOCK_WORDS * 4)
        self.words: Words = np.zeros(BLOCK_WORDS, dtype="<u4")

    def erase(self) -> None:
        self.words.fill(0)


@dataclass(frozen=True, slots=True)
class KeyStream:
    """The keystream of one 32-byte key."""

    key: Secret

    def opened(self, start: int) -> CipherContext:
        """The cipher, about to give word `start`."""
        counter, skipped = divmod(start, WORDS_PER_COUNTER)
        context = Cipher(algorithms.AES(self.key.buffer), modes.CTR(counter.to_bytes(16, "big"))).encryptor()
        if skipped:
            context.update(bytes(4 * skipped))
        return context

    def words_into(self, out: Words, start: int, workspace: Workspace) -> None:
        """Write words [start, start + len(out)) of the stream into `out`."""
        context = self.opened(start)
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
    """A signed sum of streams: what a silo adds to its encoded vector, or the coordinator to the sum of masked vectors."""

    added: tuple[KeyStream, ...]
    subtracted: tuple[KeyStream, ...]

    def apply(self, words: Words, start: int, workspace: Workspace) -> None:
        """Add words [start, start + len(words)) of the sum to `words`, in place, mod 2^32."""
        added = _opened(self.added, start)
        subtracted = _opened(self.subtracted, start)
        for position in range(0, len(words), BLOCK_WORDS):
            piece = words[position : position + BLOCK_WORDS]
            stream = workspace.words[: len(piece)]
            for context in added:
                expand(context, stream, workspace)
                np.add(piece, stream, out=piece)
            for context in subtracted:
                expand(context, stream, workspace)
                np.subtract(piece, stream, out=piece)

    def erase(self) -> None:
        for stream in (*self.added, *self.subtracted):
            stream.erase()


def _opened(streams: Sequence[KeyStream], start: int) -> list[CipherContext]:
    return [stream.opened(start) for stream in streams]
