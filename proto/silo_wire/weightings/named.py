"""The weightings that a plan may name, in the order in which people read them."""

from typing import TYPE_CHECKING, Final, Literal

from silo_wire.algorithm import Promise
from silo_wire.weightings.equal import EQUAL
from silo_wire.weightings.fednova import FEDNOVA
from silo_wire.weightings.lorar import LORAR
from silo_wire.weightings.loss_reduction import LOSS_REDUCTION
from silo_wire.weightings.q_fedavg import Q_FEDAVG, q_fedavg
from silo_wire.weightings.size import SIZE
from silo_wire.weightings.sqrt_size import SQRT_SIZE
from silo_wire.weightings.weighting import Weighting

WEIGHTINGS: Final = (LORAR, SIZE, SQRT_SIZE, LOSS_REDUCTION, EQUAL, FEDNOVA, Q_FEDAVG)

_BY_NAME: Final = {weighting.name: weighting for weighting in WEIGHTINGS}

if TYPE_CHECKING:
    WeightingName = str
else:
    WeightingName = Literal[tuple(_BY_NAME)]
    """The type of a plan's key: pydantic takes these words and no others."""


def weighting_named(name: WeightingName, *, fairness: float = 0.0) -> Weighting:
    """`fairness` is for the one that has it. Raises KeyError for a name that no plan may have."""
    return q_fedavg(fairness) if name == Q_FEDAVG.name else _BY_NAME[name]


def named_for(promise: Promise) -> str:
    """The weightings that go with a promise of differential privacy, as a message names them."""
    return " or ".join(f'"{weighting.name}"' for weighting in WEIGHTINGS if promise in weighting.promises)
