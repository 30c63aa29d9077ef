"""`[aggregation]`: how updates become a new model."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lorica_security.console.strict_toml import Section
from silo_wire.plans.robust import ReducerName, RobustRule, robust_rule
from silo_wire.plans.sections.numbers import (
    LEAST_DELTA_NORM,
    LEAST_MAX_WEIGHT,
    LEAST_SERVER_RATE,
    MOST_MAX_WEIGHT,
    MOST_NORM,
    Bound,
    ServerRate,
)
from silo_wire.server_step.step_length import StepLengthName
from silo_wire.weightings.named import WeightingName, weighting_named
from silo_wire.weightings.weighting import Weighting

LEAST_SGD_RATE = 0.01


class AggregationSection(Section):
    """How updates become a new model (DESIGN sections 3 and 4). A cap of 0 means none.

    Under secure aggregation the coordinator sees only sums: each silo itself applies `max_weight` and `max_delta_norm`.
    """

    weighting: WeightingName = "lorar"
    fairness: Annotated[float, Field(ge=0, le=10)] = 0.0  # q of q_fedavg
    reduction_memory: Annotated[float, Field(ge=0, le=0.99)] = 0.0  # of a loss reduction: what the one before counts
    reducer: ReducerName = "mean"
    trimmed_share: Annotated[float, Field(ge=0, lt=0.5)] = 0.0  # of trimmed_mean: left out on each side
    hostile_silos: Annotated[int, Field(ge=0, le=4998)] = 0  # of multi_krum, mixing: 2 f + 3 are at most 10,000
    clipping_radius: Annotated[float, Field(ge=0, le=MOST_NORM)] = 0.0  # of centred_clipping: L2 norm
    server_optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    server_learning_rate: ServerRate = 1.0
    server_rate_at_end: Annotated[float, Field(ge=0.01, le=1, allow_inf_nan=False)] = 1.0  # what is left
    step_length: StepLengthName = "fixed"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta1: Annotated[float, Field(ge=0, le=0.99)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1e-3
    max_weight: Annotated[float, Field(ge=0, le=MOST_MAX_WEIGHT)] = 0.0
    max_weight_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_delta_norm: Annotated[float, Field(ge=0, le=MOST_NORM)] = (
        1000.0  # far above what training gives, far below what ruins a model for good
    )
    secure_aggregation: bool = False
    threshold: Annotated[int, Field(ge=0, le=10_000)] = 0  # shares that open a secret; 0: the cohort's default
    colluders: Annotated[int, Field(ge=0, le=10_000)] = 0
    min_survivors: Annotated[int, Field(ge=3, le=10_000)] = 3
    delta_bound: Bound = 1.0  # largest coordinate of a delta that a masked sum can express
    max_weight_ratio: Annotated[float, Field(ge=1, le=900, allow_inf_nan=False)] = 100.0  # of two silos in a masked sum

    @model_validator(mode="after")
    def _no_value_near_zero(self) -> Self:
        """What would leave the model as it was, or all weights at nothing, without being zero, which means "none"."""
        for key, value, least in (
            ("max_weight", self.max_weight, LEAST_MAX_WEIGHT),
            ("max_delta_norm", self.max_delta_norm, LEAST_DELTA_NORM),
            ("clipping_radius", self.clipping_radius, LEAST_DELTA_NORM),
        ):
            if 0 < value < least:
                raise ValueError(
                    f"[aggregation] {key} = {value:g} is next to nothing: set 0 for none, or at least {least:g}"
                )
        least, to = self._least_server_rate, f'of server_optimizer = "{self.server_optimizer}"'
        if self.server_learning_rate < least:
            raise ValueError(
                f"[aggregation] server_learning_rate = {self.server_learning_rate:g} {to} leaves the model almost as "
                f"it was: set at least {least:g}"
            )
        if self.last_server_rate < least:
            enough = math.ceil(1e4 * least / self.server_learning_rate) / 1e4
            raise ValueError(
                f"[aggregation] server_rate_at_end = {self.server_rate_at_end:g} brings server_learning_rate {to} to "
                f"{self.last_server_rate:g} in the last round, which leaves the model almost as it was: set at least "
                f"{enough:g}, or a higher server_learning_rate"
            )
        return self

    @property
    def last_server_rate(self) -> float:
        """Of the plan's last round."""
        return self.server_learning_rate * self.server_rate_at_end

    @property
    def _least_server_rate(self) -> float:
        """With less, a step by a delta that is small beside tau is less than a hundredth of it, in a first round."""
        in_tau = {"sgd": 0.0, "adam": 1.0, "adagrad": 2.0, "yogi": 2.0 / (1.0 - self.beta1)}[self.server_optimizer]
        return max(LEAST_SERVER_RATE, LEAST_SGD_RATE * self.tau * in_tau) if in_tau else LEAST_SGD_RATE

    @property
    def weighs(self) -> Weighting:
        """The weighting as a value."""
        return weighting_named(self.weighting, fairness=self.fairness)

    @property
    def robust(self) -> RobustRule | None:
        """The robust reducer as a value; None for the mean."""
        return robust_rule(self.reducer)

    @property
    def carried(self) -> tuple[str, ...]:
        """The vectors as long as the model that the reducer keeps from round to round."""
        return () if self.robust is None else self.robust.carries

    @property
    def weight_cap(self) -> float:
        """What a silo's weight is bounded by where it is taken as a share of that: in masked sums, under silo-level
        privacy."""
        return self.max_weight if self.weighs.only_weight is None else self.weighs.only_weight

    @property
    def least_weight(self) -> float:
        """What a silo weighs at least in a masked sum, so that nobody's delta counts `max_weight_ratio` times
        another's."""
        return self.weight_cap / self.max_weight_ratio
