"""The bytes of a vector in int8.

The flat vector is cut into blocks of 1,024 numbers, the last of which may be shorter, wherever its tensors begin and
end. Each block is its scale, one little-endian float32, and then a signed byte for each number: a number is its byte
times the scale of its block. A chunk of such a vector begins where a block does, so that it is read by itself.
"""

from typing import Final

BLOCK_NUMBERS: Final = 1024
SCALE_BYTES: Final = 4
BLOCK_BYTES: Final = SCALE_BYTES + BLOCK_NUMBERS
MOST_STEPS: Final = 127
"""The largest size of a number, in steps of its block's scale. A byte could say -128 as well: nobody may."""
LEAST_SCALE: Final = 2.0**-126
"""The smallest normal float32: whatever is multiplied by it is normal as well, and computed alike everywhere."""
MOST_SCALE: Final = 2.0**120
"""127 times this is within float32's range."""


def blocks_of(numbers: int) -> int:
    """Blocks of a vector of so many numbers."""
    return -(-numbers // BLOCK_NUMBERS)


def bytes_of(numbers: int) -> int:
    """Bytes of a vector, or of its beginning where that ends with a block, of so many numbers."""
    return numbers + SCALE_BYTES * blocks_of(numbers)


def numbers_of(size: int) -> int:
    """How many numbers a vector of `size` bytes has: the inverse of `bytes_of`."""
    return size - SCALE_BYTES * -(-size // BLOCK_BYTES)
