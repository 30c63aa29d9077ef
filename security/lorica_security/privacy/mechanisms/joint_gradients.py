"""A sum of gradients over several silos, whose noise they make together; only that sum is seen."""

from typing import Final

from lorica_security.privacy.mechanisms.mechanism import Mechanism

JOINT_GRADIENTS: Final = Mechanism(
    name="joint_gradients",
    meaning="a sum of clipped gradients of several silos, which make its noise together; only their sum is seen",
    joint=True,
)
