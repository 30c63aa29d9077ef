"""What the coordinator may order under a plan, and of which model: the plan's word, not the coordinator's.

Rounds beyond the plan's, or that others train in by the plan, scores at other times than the plan's, and a second model
in the place of one are refused. Under masks nothing is scored on order: the scores of the model that a round begins
with are part of what leaves at its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from silo_wire.canonical import Digest
from silo_wire.messages import Evaluate, Train
from silo_wire.plans.sections.who_trains import EVERYBODY, WhoTrains
from silo_wire.plans.timetable import Timetable

ModelOf = tuple[Digest, int]
"""A plan, and the round that made one of its models; 0: the initial one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsPlanned:
    """`tells_scores`: whether this silo's people let its scores leave, alone or in a sum. `who` trains in which round,
    of whom this is `silo`."""

    timetable: Timetable
    tells_scores: bool
    silo: str = ""
    who: WhoTrains = EVERYBODY

    def unplanned(self, order: Train | Evaluate) -> str:
        """Why the plan has no such order, in a line; "" for one that it has."""
        times, number = self.timetable, order.key.round
        if isinstance(order, Train):
            if times.opens(number):
                return self.who.not_its_turn(self.silo, number)
            return f"round {number} was ordered, the plan's rounds are 1 to {times.last_round}"
        if times.masked:
            return f"scores of round {number} were ordered, under masks they leave in a sum alone"
        if times.scores(number):
            return ""
        return f"scores of round {number} were ordered, at which the plan has none"

    def model_of(self, order: Train | Evaluate) -> ModelOf | None:
        """Which of the plan's models the order must name; None where it may name any.

        In the clear a round may begin with another model than an attempt before: a coordinator that was put back from a
        backup makes its rounds again, and sees of each what it saw before.
        """
        if isinstance(order, Evaluate):
            return order.key.plan, order.key.round
        return (order.key.plan, order.key.round - 1) if self.timetable.masked else None

    def scores(self, order: Train) -> bool:
        """Whether this silo's scores of the order's model leave with its update."""
        return self.timetable.masked and self.tells_scores and self.timetable.scores(order.key.round - 1)


def second_model(known: Mapping[ModelOf, Digest], of: ModelOf | None, model: Digest) -> bool:
    """Whether the coordinator handed out another model before as that of the same round."""
    return of is not None and known.get(of, model) != model
