"""Noised sums of clipped gradients, which are released as a trained model."""

from typing import Final

from lorica_security.privacy.mechanisms.mechanism import Mechanism

GRADIENTS: Final = Mechanism(
    name="gradients", meaning="noised sums of clipped gradients of a silo, one each optimizer step, as a trained model"
)
