"""The server's step that a plan asks for: its optimizer, and what that one's rate is multiplied by, round by round.

One rule for the coordinator, and for silos that make a chunk of its model again. It follows a round's number, whether
or not rounds before it made a model.
"""

from dataclasses import dataclass
from typing import Final

from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.who_trains import EVERYBODY, WhoTrains
from silo_wire.server_step.server_optimizer import ServerOptimizer, optimizer_named


def optimizer_of(section: AggregationSection) -> ServerOptimizer:
    """Raises ConfigurationError for a value outside its range."""
    return optimizer_named(
        section.server_optimizer,
        learning_rate=section.server_learning_rate,
        momentum=section.momentum,
        beta1=section.beta1,
        beta2=section.beta2,
        tau=section.tau,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRates:
    """Of a plan of `rounds` rounds, over which the rate falls in a straight line to the part `at_end` of itself.

    `who` trains in a round has a part in it as well.
    """

    who: WhoTrains = EVERYBODY
    at_end: float = 1.0
    rounds: int = 1

    def of(self, round_number: int, silos: int) -> float:
        """In the round `round_number`, from 1, whose sum is of `silos` silos."""
        return self.fallen_to(round_number) * self.who.server_rate(round_number, silos)

    def fallen_to(self, round_number: int) -> float:
        """1 in the first round, `at_end` in the last."""
        if self.rounds == 1:
            return 1.0
        return 1.0 - (1.0 - self.at_end) * ((round_number - 1) / (self.rounds - 1))


UNCHANGED: Final = ServerRates()
