"""Noise for one vector, block by block: the same whenever it is drawn from the
same key, in whatever order, by however many threads.

A release that may have to be made again, after a crash, must have the noise that it had: two releases of one sum with
fresh noise each tell more than either. So the noise follows from a secret and from what it is bound to.
"""

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lorica_security.noise.discrete_gaussian import SIGMA_BITS, Integers, draw
from lorica_security.noise.random_words import KEY_BYTES, RandomWords

BLOCK_ELEMENTS = 1 << 16
_PREFIX = b"lorica/v1/noise/"


def bound_key(root: bytes, statement: bytes) -> bytes:
    """The key of the noise that is bound to `statement`, from a secret `root`
    of 32 bytes: another one for any other statement.
    """
    if len(root) != KEY_BYTES:
        raise ValueError(f"a root of {len(root)} bytes was given, {KEY_BYTES} are needed")
    return _derived(root, b"release\0" + statement)


class NoiseStream:
    """Discrete Gaussian noise of standard deviation 2^`sigma_bits` for each element of a vector."""

    def __init__(self, key: bytes, *, sigma_bits: int = SIGMA_BITS) -> None:
        """`key` is used for nothing else."""
        self._key, self._sigma_bits = key, sigma_bits

    def block(self, index: int, count: int) -> Integers:
        """Of `count` elements from `index` * BLOCK_ELEMENTS on, at most BLOCK_ELEMENTS."""
        words = RandomWords(_derived(self._key, b"block\0" + index.to_bytes(8, "big")))
        return draw(words, count, sigma_bits=self._sigma_bits)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=_PREFIX + purpose).derive(secret)
