"""bfloat16 as it is published: the nearest number, ties to even, never a silent infinity."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError
from silo_wire.server_step.rounding import round_to_bfloat16

LARGEST = 0x7F7F << 16  # the largest bfloat16, as the bits of a float32


def rounded(value: float) -> float:
    out = torch.empty(1, dtype=torch.bfloat16)
    round_to_bfloat16(torch.tensor([value]), out)
    return float(out)


def of_bits(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


@given(st.integers(0, LARGEST), st.sampled_from([1.0, -1.0]))
def test_the_nearest_and_of_two_as_near_the_even_one(bits: int, sign: float) -> None:
    below, above = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    rest = bits & 0xFFFF
    nearest = below if rest < 0x8000 or (rest == 0x8000 and not below & 0x10000) else above
    assert rounded(sign * of_bits(bits)) == sign * of_bits(nearest)


def test_largest_number_stays_and_the_next_step_is_refused() -> None:
    assert rounded(of_bits(LARGEST)) == of_bits(LARGEST)
    assert rounded(of_bits(LARGEST + 0x7FFF)) == of_bits(LARGEST)
    assert math.isfinite(of_bits(LARGEST + 0x8000))
    for sign in (1, -1):
        with pytest.raises(ConfigurationError, match=r"rounds to infinity in bfloat16: .* \[wire\] model to float32"):
            rounded(sign * of_bits(LARGEST + 0x8000))


def test_an_infinity_among_many_is_found() -> None:
    values = torch.zeros(10_000)
    values[7_777] = 3.4e38
    with pytest.raises(ConfigurationError):
        round_to_bfloat16(values, torch.empty(10_000, dtype=torch.bfloat16))
