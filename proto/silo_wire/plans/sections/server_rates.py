"""What a plan multiplies its server's learning rate by, round by round.

One rule for the coordinator, and for silos that make a chunk of its model again. It follows a round's number, whether
or not rounds before it made a model.
"""

from dataclasses import dataclass
from typing import Final

from silo_wire.plans.sections.who_trains import EVERYBODY, WhoTrains


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
