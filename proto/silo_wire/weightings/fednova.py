"""FedNova (Wang et al., NeurIPS 2020): deltas per optimizer step, averaged by the number of examples.

    mean = tau_eff * (sum of p_i * delta_i / tau_i)     p_i = |D_i| / (sum of |D|)     tau_eff = sum of p_i * tau_i

Under FedAvg a silo of many steps pulls further than its examples say, and the federation minimises another objective
than the one that |D_i| states. Here a delta counts per step. Equal numbers of steps give FedAvg by size.

The paper divides by the norm of a vector a_i, which says how much each local gradient counts in delta_i. It is tau_i,
the number of steps, for plain SGD at a constant rate. It is tau_i here as well: AdamW and Adafactor begin anew in every
round, and each of their steps moves a parameter by about the learning rate, whatever the size of the gradient. A linear
schedule gives (tau_i + 1) / 2 instead, which is nearly in proportion. What makes steps of one silo count unlike those
of another is refused.

That is a weighted mean with weights |D_i| / tau_i, times a length. Under masks the coordinator learns the sum of these
weights and no second one, so the length stays 1: the mean points the same way, and is tau_eff = 1 / (sum of p_i /
tau_i) steps long, the weighted harmonic mean of the steps. That is never longer than above. The paper leaves tau_eff to
the server; server_learning_rate sets it.

No silo weighs more than the examples of one step over the epochs, whatever number of examples it claims: the
coordinator compares the steps with the plan's.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from lorica_security.errors import MalformedMessage
from silo_wire.algorithm import Number
from silo_wire.weightings.weighting import Clash, Told, Training, Weighting


def _per_step(told: Told) -> float:
    if told.optimizer_steps < 1:
        raise MalformedMessage(
            f"a silo of {told.examples} examples reports no optimizer step: leave it out of the round"
        )
    return told.examples / told.optimizer_steps


def _length(cohort: Sequence[Told]) -> float:
    """tau_eff over what the weighted mean has already: (sum of |D| tau) * (sum of |D| / tau) / (sum of |D|)^2, at
    least 1."""
    size = math.fsum(told.examples for told in cohort)
    of_steps = math.fsum(told.examples / size * told.optimizer_steps for told in cohort)
    return of_steps * math.fsum(told.examples / size / told.optimizer_steps for told in cohort)


def _clashes(training: Training) -> Iterator[Clash]:
    if training.steps:
        yield Clash(
            key="[training] steps",
            value=f"{training.steps}",
            needed="0",
            why='which bounds by a silo\'s steps what it may claim; where all make as many, it is "size"',
        )
    if training.fedprox_mu:
        yield Clash(
            key="[training] fedprox_mu",
            value=f"{training.fedprox_mu:g}",
            needed="0",
            why="which counts every step alike, where FedProx's pull lets later steps count less",
        )
    for silo, override in training.overrides.items():
        if override.learning_rate not in (None, training.learning_rate):
            yield Clash(
                key=f"[training.overrides.{silo}] learning_rate",
                value=f"{override.learning_rate:g}",
                needed=f"that of [training], {training.learning_rate:g}",
                why="which counts the steps of all silos alike",
            )


FEDNOVA: Final = Weighting(
    name="fednova",
    meaning="examples / optimizer steps, and the mean times the steps of an average silo",
    needs=frozenset({Number.EXAMPLES, Number.OPTIMIZER_STEPS}),
    raw_weight=_per_step,
    masks="the same direction; as long as the harmonic mean of the steps",
    first_cap="batch_size x gradient_accumulation / epochs",
    length=_length,
    clashes=_clashes,
)
