"""Kinds of numbers in a plan, with their bounds."""

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Rate = Annotated[float, Field(ge=1e-7, le=10, allow_inf_nan=False)]
"""Of local training. Below it a step is lost in float32's rounding, and the silo stands still; above it no model
learns."""
LEAST_SERVER_RATE = 1e-4
ServerRate = Annotated[float, Field(ge=LEAST_SERVER_RATE, le=10, allow_inf_nan=False)]
"""Below it two round models are almost one, and two sums over them almost two sums over one model."""
Bound = Annotated[float, Field(ge=1e-9, le=1e9, allow_inf_nan=False)]
"""Of what a masked round can express."""
LEAST_MAX_WEIGHT, MOST_MAX_WEIGHT = 1e-9, 1e12
LEAST_DELTA_NORM, MOST_NORM = 1e-3, 1e9
