"""Private chunks as a GPU has them, on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from silo_agent.training.private.per_example import chunks


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Where no row has in company the bits that it has alone, and launches of kernels are what takes time."""
    with (
        patch.object(chunks, "launches_are_what_takes_time", lambda device: True),
        patch.object(chunks._Trials, "rows_keep_their_bits", lambda *of: False),
    ):
        yield
