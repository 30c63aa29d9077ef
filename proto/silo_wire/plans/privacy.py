"""`[privacy]` of a plan: what differential privacy it promises, and the schedule that keeps the promise.

Everything here is public and the same for every silo. What a silo trains with, divides by and adds as noise follows
from these numbers alone and never from how many records it has: the noise of an update would tell that otherwise.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lorica_security.console.strict_toml import Section, ShownText
from lorica_security.errors import ConfigurationError
from lorica_security.privacy.accounting import (
    LEAST_DP_DELTA,
    LEAST_NOISE,
    MOST_NOISE,
    GaussianRelease,
    NeighbouringRelation,
    epsilon_of,
)
from silo_wire.messages import TrainingSummary

LEAST_BOUND, MOST_BOUND = 1e-12, 1e6
"""Of what is clipped to and cut at: float32 has room for sums and for noise of such sizes."""
Bound = Annotated[float, Field(ge=LEAST_BOUND, le=MOST_BOUND)]
MOST_VIEWS = 16
NoiseMultiplier = Annotated[float, Field(ge=0, le=MOST_NOISE)]

Release = tuple[str, GaussianRelease]
"""The name of a mechanism (lorica_security.privacy.mechanisms), and the numbers of its noise."""


class PrivacySection(Section):
    """One unit more or less changes how likely anything is that is released in a run by at most `target_epsilon`.

    The unit of `level` "record" is a record. With `noise` "own" what is released is all that leaves its silo; with
    "joint" its silo makes a part of the noise alone, and what is released is the sum of several silos, which is all
    that is seen of it. That of "silo" is a silo with all of its records, and what is released is a noised sum of
    clipped deltas: to whoever sees models, or, where the silos make the noise, to the coordinator as well.
    """

    level: Literal["none", "record", "silo"] = "none"
    noise: Literal["own", "joint"] = "own"  # of level "record": what covers each update alone, or the masked sum of all
    target_epsilon: Annotated[float, Field(gt=0, le=1e3)] = 8.0  # of all rounds together
    dp_delta: Annotated[float, Field(ge=LEAST_DP_DELTA, lt=1)] = 1e-5
    neighbouring_relation: NeighbouringRelation = "add_or_remove_one"
    unit_field: Annotated[ShownText, Field(max_length=100)] = (
        ""  # key whose equal values make one unit; "": each line is one
    )
    nominal_records: Annotated[int, Field(ge=1, le=1 << 40)] = 1000  # or units: the public stand-in for |D_i|
    expected_batch_size: Annotated[int, Field(ge=1, le=1 << 30)] = 128
    steps: Annotated[int, Field(ge=1, le=1_000_000)] = 20  # optimizer steps of a round; of joint noise 1
    answer_after_s: Annotated[float, Field(ge=0, le=1e7)] = (
        0.0  # of joint noise: how long after its order a silo says that it has trained, whatever its sample
    )
    noise_multiplier: NoiseMultiplier = (
        0.0  # over max_grad_norm or max_delta_norm; 0: `plan new` finds the least that will do
    )
    average_decay: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of an average of a round's iterates; 0: the last one
    augmentations: Annotated[int, Field(ge=1, le=MOST_VIEWS)] = 1  # views of a record that its gradient is the mean of
    loss_bound: Bound = 10.0  # a record's loss counts as at most this in the weight
    loss_noise_multiplier: NoiseMultiplier = 5.0  # on the scaled loss reduction, over loss_bound
    nominal_silos: Annotated[int, Field(ge=1, le=1 << 30)] = 100  # what a noised sum of deltas is divided by
    max_noise_to_signal: Annotated[float, Field(ge=1e-6, le=1e12)] = (
        1.0  # L2 norm of a sum's noise over the most that nominal_silos could sum to
    )

    @model_validator(mode="after")
    def _sampling_is_possible(self) -> Self:
        if self.level == "record" and self.expected_batch_size > self.nominal_records:
            raise ValueError(
                f"[privacy] expected_batch_size = {self.expected_batch_size} is above nominal_records = "
                f"{self.nominal_records}: the sampling rate would be above 1"
            )
        return self

    @model_validator(mode="after")
    def _lines_are_grouped_for_a_promise_alone(self) -> Self:
        """Elsewhere the key would do nothing but have those silos decline, by name, whose lines lack it."""
        if self.unit_field and self.level != "record":
            raise ValueError(
                f'[privacy] unit_field = "{self.unit_field}" does not go with level = "{self.level}", under which '
                "no line is grouped "
                'with another: set it to "", or level to "record"'
            )
        return self

    @model_validator(mode="after")
    def _noised_iterates_alone_are_averaged(self) -> Self:
        if self.average_decay and self.level != "record":
            raise ValueError(
                f'[privacy] average_decay = {self.average_decay:g} does not go with level = "{self.level}", under '
                "which no iterate has "
                'noise that an average would take away: set it to 0, or level to "record"'
            )
        return self

    @model_validator(mode="after")
    def _joint_noise_covers_records(self) -> Self:
        if self.noise == "joint" and self.level != "record":
            raise ValueError(
                f'[privacy] noise = "joint" does not go with level = "{self.level}": it is noise of several silos '
                "for single records; set "
                'it to "own", or level to "record"'
            )
        if self.answer_after_s and self.noise != "joint":
            raise ValueError(
                f'[privacy] answer_after_s = {self.answer_after_s:g} does not go with noise = "own", under which a '
                "silo answers when it "
                'has trained: set it to 0, or noise to "joint"'
            )
        return self

    @model_validator(mode="after")
    def _clipped_records_alone_have_views(self) -> Self:
        if self.augmentations > 1 and self.level != "record":
            raise ValueError(
                f'[privacy] augmentations = {self.augmentations} does not go with level = "{self.level}", under '
                "which no gradient is a "
                'single record\'s: set it to 1, or level to "record"'
            )
        return self

    @property
    def sampling_rate(self) -> float:
        return self.expected_batch_size / self.nominal_records

    @property
    def weight_cap(self) -> float:
        """No silo of `nominal_records` records could reduce its summed loss by more."""
        return self.nominal_records * self.loss_bound

    def noise_to_signal(self, parameters: int, silos: int) -> float:
        """Of a sum of deltas: the expected L2 norm of its noise over that of the longest sum that `silos` silos could
        come to."""
        return self.noise_multiplier * math.sqrt(parameters) / silos

    def silos_for(self, parameters: int) -> int:
        """How many silos it takes to keep `max_noise_to_signal`."""
        return math.ceil(self.noise_multiplier * math.sqrt(parameters) / self.max_noise_to_signal)

    def summary(self, weight: float | None) -> TrainingSummary:
        """What a silo tells of its training: the noised scaled loss reduction, if there is one, and public numbers.

        As |D_i| x dL_i, so that it weighs what it is: the former nominal, the latter the rest of the product.
        """
        reduction = 0.0 if weight is None else weight / self.nominal_records
        return TrainingSummary(
            examples=self.nominal_records,
            loss_max=reduction,
            loss_min=0.0,
            loss_first=reduction,
            loss_last=0.0,
            optimizer_steps=self.steps,
            seconds=0.0,
        )

    def releases_of_round(
        self, *, weighted: bool, noise_multiplier: float | None = None, makers: int = 2
    ) -> Sequence[Release]:
        """What one round releases of one unit; `weighted` where updates weigh by their loss reduction, `makers` of
        joint noise."""
        noise = self.noise_multiplier if noise_multiplier is None else noise_multiplier
        if self.noise == "joint":
            return [("joint_gradients", GaussianRelease(noise, self.sampling_rate, self.steps, makers))]
        if self.level == "silo":
            return [("delta", GaussianRelease(noise))]
        gradients = GaussianRelease(noise, self.sampling_rate, self.steps)
        releases: list[Release] = [("gradients", gradients)]
        if weighted:
            releases.append(("loss_reduction", GaussianRelease(self.loss_noise_multiplier)))
        return releases

    def epsilon(self, *, rounds: int, weighted: bool, noise_multiplier: float | None = None) -> float:
        """What `rounds` rounds cost together; of joint noise towards who sees sums, which is the same for any number of
        makers."""
        once = self.releases_of_round(weighted=weighted, noise_multiplier=noise_multiplier)
        return epsilon_of(
            [replace(release, steps=release.steps * rounds) for _, release in once],
            dp_delta=self.dp_delta,
            relation=self.neighbouring_relation,
        )


def calibrated_noise(section: PrivacySection, *, rounds: int, weighted: bool) -> float:
    """The least noise multiplier on gradients or deltas, to 0.1 %, that keeps `rounds` rounds within `target_epsilon`.

    Raises ConfigurationError where no noise does, because the weights alone cost more, or next to no noise would.
    """

    def cost(noise: float) -> float:
        return section.epsilon(rounds=rounds, weighted=weighted, noise_multiplier=noise)

    high = 1.0
    while cost(high) > section.target_epsilon:
        high *= 2
        if high > 1e5:
            weights = epsilon_of(
                [GaussianRelease(section.loss_noise_multiplier, steps=rounds)] if weighted else [],
                dp_delta=section.dp_delta,
                relation=section.neighbouring_relation,
            )
            raise ConfigurationError(
                f"[privacy] target_epsilon = {section.target_epsilon} cannot be reached: the weights of {rounds} "
                f"rounds alone cost {weights:.3g}; raise loss_noise_multiplier = {section.loss_noise_multiplier} or "
                "target_epsilon, or use "
                '[aggregation] weighting = "equal"'
            )
    low = LEAST_NOISE  # what less noise promises, nobody should rely on
    if cost(low) <= section.target_epsilon:
        return low
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) > section.target_epsilon else (low, middle)
    return high
