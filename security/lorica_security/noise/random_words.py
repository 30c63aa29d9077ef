"""Random words from AES-256-CTR under a key of their own: what sampling and noise are drawn from.

torch's and numpy's generators are simulations: who sees some of their output can tell the rest, and with it the noise.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Words64 = NDArray[np.uint64]
Words32 = NDArray[np.uint32]

KEY_BYTES = 32
_BLOCK = bytes(1 << 18)


class RandomWords:
    """One stream of words, each given once. `key` is 32 bytes from the operating system, used for nothing else."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes was given, {KEY_BYTES} are needed")
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words64(self, count: int) -> Words64:
        out = np.empty(count, dtype="<u8")
        self._fill(out.view(np.uint8))
        return out

    def words32(self, count: int) -> Words32:
        out = np.empty(count, dtype="<u4")
        self._fill(out.view(np.uint8))
        return out

    def below(self, bound: int, count: int) -> Words32:
        """Uniform integers from 0 to `bound` - 1, `bound` at most 2^16; exactly
        uniform, since what is left over is drawn anew.
        """
        if bound & (bound - 1) == 0:
            drawn = self.words32(count)
            return np.bitwise_and(drawn, np.uint32(bound - 1), out=drawn)
        limit = np.uint32((1 << 32) - (1 << 32) % bound)
        drawn = self.words32(count)
        while (over := np.flatnonzero(drawn >= limit)).size:
            drawn[over] = self.words32(over.size)
        return np.remainder(drawn, np.uint32(bound), out=drawn)

    def _fill(self, out: NDArray[np.uint8]) -> None:
        for start in range(0, len(out), len(_BLOCK)):
            piece = out[start : start + len(_BLOCK)]
            self._stream.update_into(memoryview(_BLOCK)[: len(piece)], piece.data)
