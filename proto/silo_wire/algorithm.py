"""What every algorithm of aggregation says of itself: which numbers it needs of a silo, and where it may be used.

A weighting says what a silo's delta counts, a reducer what the deltas of a round come to, a step length how far the
server goes with that. Validation of plans, the
forecast, the documentation and aggregation read what they need from these values, so that a new algorithm is named in
no other place.
"""

from enum import StrEnum
from typing import Literal, Protocol

Promise = Literal["record", "joint", "silo"]
"""Of differential privacy: `[privacy] level`, where "joint" is level "record" with noise that silos make together."""


class Number(StrEnum):
    """A number of one silo's update."""

    EXAMPLES = "examples"
    LOSS_REDUCTION = "loss reduction"
    ROUND_LOSS = "loss at the round model"
    OPTIMIZER_STEPS = "optimizer steps"
    DELTA_NORM = "delta norm"


class Algorithm(Protocol):
    """What the generated table of ops/docs/plan.md has a row of."""

    @property
    def name(self) -> str:
        """As a plan names it, where a plan does."""

    @property
    def meaning(self) -> str:
        """In a few words or a formula."""

    @property
    def needs(self) -> frozenset[Number]:
        """The numbers of one silo that the coordinator, or under masks the silo itself, must know."""

    @property
    def masks(self) -> str:
        """What it does under secure aggregation, where it goes with it; else empty."""

    @property
    def promises(self) -> frozenset[Promise]:
        """The promises of differential privacy that it goes with."""

    @property
    def passes(self) -> int:
        """How many times it reads every delta."""
