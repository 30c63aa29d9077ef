"""q-FedAvg (Li, Sanjabi, Beirami and Smith, Fair Resource Allocation in Federated Learning, ICLR 2020).

    weight = |D_i| * F_i ** q        F_i: the loss of the silo's data at the round model, before it trains

The federation then minimises the sum of |D_i| F_i ** (q + 1) / (q + 1): the larger q, the more silos count that the
model serves badly. q = 0 is FedAvg by size. In the paper's algorithm 2 a silo is drawn with probability |D_i| / |D| and
counts F_i ** q; where all take part, |D_i| stands for the draw.

The paper divides by the sum of h_i = q F_i ** (q - 1) |L delta_i| ** 2 + L F_i ** q, an estimate of curvature for which
somebody has to tell L. Here the weights become shares that sum to 1: the mean points the same way, and
server_learning_rate says how far the step goes.

F_i is the loss of the sample that the silo evaluates before it trains. A silo tells it itself, and one that claims more
weighs more: max_weight and max_weight_share bound that.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from silo_wire.algorithm import Number
from silo_wire.weightings.weighting import Clash, Told, Training, Weighting


@dataclass(frozen=True, slots=True)
class _Powered:
    fairness: float

    def __call__(self, told: Told) -> float:
        try:
            return float(told.examples * told.loss_first**self.fairness)
        except OverflowError:  # which every cap cuts; the coordinator takes no such loss
            return math.inf


def q_fedavg(fairness: float) -> Weighting:
    """With q = `fairness`, above 0."""
    return Weighting(
        name="q_fedavg",
        meaning="examples x loss at the round model to the power fairness",
        needs=frozenset({Number.EXAMPLES, Number.ROUND_LOSS}),
        raw_weight=_Powered(fairness),
        first_cap="its examples times its loss at the initial model to the power fairness",
        clashes=_clashes,
    )


def _clashes(training: Training) -> Iterator[Clash]:
    if training.loss_reduction != "evaluated":
        yield Clash(
            key="[training] loss_reduction",
            value=f'"{training.loss_reduction}"',
            needed='"evaluated"',
            why="which weighs by the loss at the round model, and of logged losses none is that",
        )


Q_FEDAVG: Final = q_fedavg(1.0)
"""What every q of it says of itself."""
