"""A noised loss reduction times the number of examples, which an update weighs by."""

from typing import Final

from lorica_security.privacy.mechanisms.mechanism import Mechanism

LOSS_REDUCTION: Final = Mechanism(
    name="loss_reduction", meaning="the noised loss reduction of a silo, times its examples, as the weight of an update"
)
