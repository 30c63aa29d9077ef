"""The mechanisms that a ledger may name."""

from typing import Final

from lorica_security.errors import ConfigurationError
from lorica_security.privacy.mechanisms.delta import DELTA
from lorica_security.privacy.mechanisms.gradients import GRADIENTS
from lorica_security.privacy.mechanisms.joint_gradients import JOINT_GRADIENTS
from lorica_security.privacy.mechanisms.loss_reduction import LOSS_REDUCTION
from lorica_security.privacy.mechanisms.mechanism import Mechanism

MECHANISMS: Final = (GRADIENTS, LOSS_REDUCTION, DELTA, JOINT_GRADIENTS)

_BY_NAME: Final = {mechanism.name: mechanism for mechanism in MECHANISMS}


def mechanism_named(name: str) -> Mechanism:
    """Raises ConfigurationError for a name that no ledger of this release has."""
    if name not in _BY_NAME:
        raise ConfigurationError(
            f"{name!r} is no mechanism of a privacy ledger: this release has {', '.join(_BY_NAME)}; install the "
            "release that wrote it"
        )
    return _BY_NAME[name]
