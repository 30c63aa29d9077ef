"""When a plan's models are trained from and scored: what coordinator and silos both hold each other to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timetable:
    """`every`, `initial` and `last` as in the plan's [evaluation]; `masked`: under secure aggregation.

    A model is called by the round that made it; 0 is the initial one, which round 1 trains from. In the clear silos are
    asked for scores when a model is made. Under masks the scores of model r travel in the masked vectors of round r +
    1, which trains from it; where the last model is to be scored there is one round more, the closing one, in which
    nobody trains.
    """

    rounds: int
    every: int
    initial: bool
    last: bool
    masked: bool

    def scores(self, model_round: int) -> bool:
        """Whether silos score the model that this round made."""
        if not 0 <= model_round <= self.rounds:
            return False
        if model_round == 0:
            return self.initial
        if model_round == self.rounds and self.last:
            return True
        return self.every > 0 and model_round % self.every == 0

    @property
    def has_scores(self) -> bool:
        return self.initial or self.last or 0 < self.every <= self.rounds

    @property
    def last_round(self) -> int:
        """The closing round's number where there is one."""
        return self.rounds + (self.masked and self.scores(self.rounds))

    def is_closing(self, round_number: int) -> bool:
        return round_number > self.rounds

    def opens(self, round_number: int) -> bool:
        """Whether there is such a round."""
        return 1 <= round_number <= self.last_round
