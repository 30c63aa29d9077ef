"""The step from a sum to the next model has the same bits on every CPU, however it is cut: silos prove a coordinator
false by them."""

import json
import os
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silo_wire.server_step import server_optimizer
from tests.support.server_step_bits import OPTIMIZERS

CAPABILITIES = ("default", "avx2", "avx512")


def output(*command: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_step_has_the_same_bits_on_every_cpu_with_any_threads_stretches_and_alignments() -> None:
    own = torch.backends.cpu.get_cpu_capability().lower()
    if own not in CAPABILITIES:
        pytest.skip(f"torch computes with {own} here, which has no lesser kinds")
    wanted = CAPABILITIES[: CAPABILITIES.index(own) + 1]
    found = [json.loads(line) for line in output("-m", "tests.support.server_step_bits", *wanted)]
    assert [one["capability"].lower() for one in found] == list(wanted)
    for name in OPTIMIZERS:
        assert len({digest for one in found for digest in one["cases"][name]}) == 1, name


DECODED = """
import numpy as np
from blake3 import blake3
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint, Ranges, averaged, decode
sizes = [3, 1000, 70001]
ranges = Ranges.of(sizes=sizes, largest_delta=[0.3, 1e-30, 7e-4], largest_weight=12345.678)
point = averaged(FixedPoint.of(cohort=7, ranges=ranges), 1e-2)
words = np.random.default_rng(3).integers(0, 2**32, ranges.elements, dtype="<u4")
for stretch in (ranges.elements, 1003):
    out = np.zeros(ranges.elements, dtype="<f4")
    for first in range(0, ranges.elements, stretch):
        decode(point, words[first : first + stretch], first, out[first : first + stretch])
    print(blake3(out.tobytes()).hexdigest())
"""


def test_mean_has_the_same_bits_with_and_without_vector_instructions() -> None:
    dispatched = "import numpy._core._multiarray_umath as it; print(*it.__cpu_dispatch__)"
    (features,) = output("-c", dispatched)
    digests = {*output("-c", DECODED), *output("-W", "ignore", "-c", DECODED, NPY_DISABLE_CPU_FEATURES=features)}
    assert len(digests) == 1


@given(st.floats(0.0, 1.0, exclude_max=True), st.integers(1, 5_000))
def test_power_of_the_bias_correction_is_right_to_the_last_digits(base: float, exponent: int) -> None:
    found = server_optimizer._power(base, exponent)
    exact = Fraction(base) ** min(exponent, 300)
    if exponent <= 300:
        assert abs(Fraction(found) - exact) <= exact * Fraction(1, 2**42) + Fraction(1, 2**1060)
    else:
        assert 0.0 <= found <= float(exact)


def test_power_takes_products_alone() -> None:
    """Worked by hand: 0.9, squared, squared again, times 0.9."""
    square = 0.9 * 0.9
    assert server_optimizer._power(0.9, 5) == 0.9 * (square * square)
