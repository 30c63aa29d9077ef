"""How torch's generators begin, which order of data and dropout are drawn from.

A number begins them as torch does it, which takes 32 bits of it on a CPU (Mersenne Twister) and 64 on a GPU (Philox). A
key of a silo's own begins the CPU's with all of its 256 bits: who guesses a record may try out 2^32 orders, and not
that many.
"""

from typing import Final

import numpy as np
import torch
from blake3 import blake3

Seed = int | bytes
"""A number of at most 63 bits that others may know, or a key of 32 bytes that nobody else does."""

_WORDS: Final = 624
"""Of the state of a Mersenne Twister, 32 bits each."""
_STATE: Final = slice(24, 24 + 8 * _WORDS)
"""Where `torch.Generator.get_state` has them, each as 8 bytes."""
_STATE_BYTES: Final = 5056
_SEED_BYTES: Final = 8


def begun(generator: torch.Generator, seed: Seed) -> torch.Generator:
    """`generator`, a CPU's, at the beginning that `seed` says."""
    if isinstance(seed, int):
        return generator.manual_seed(seed)
    generator.manual_seed(_number(seed))
    state = generator.get_state()
    assert len(state) == _STATE_BYTES, "another generator than torch's Mersenne Twister"
    words = np.frombuffer(blake3(seed).digest(length=4 * _WORDS), dtype="<u4")
    state[_STATE] = torch.from_numpy(words.astype("<u8").view(np.uint8))
    generator.set_state(state)
    return generator


def begin_all(seed: Seed) -> None:
    """The generators of the process, of every device."""
    torch.manual_seed(seed if isinstance(seed, int) else _number(seed))
    if not isinstance(seed, int):
        begun(torch.default_generator, seed)


def _number(key: bytes) -> int:
    """For the generators that take no more than a number."""
    return int.from_bytes(blake3(key).digest(length=_SEED_BYTES, seek=4 * _WORDS), "little") >> 1
