"""A noised sum of clipped deltas, each of one silo with all of its records."""

from typing import Final

from lorica_security.privacy.mechanisms.mechanism import Mechanism

DELTA: Final = Mechanism(
    name="delta",
    meaning="the clipped delta of a silo in a noised sum of deltas: noise for the whole silo",
    of_any_unit=True,
)
