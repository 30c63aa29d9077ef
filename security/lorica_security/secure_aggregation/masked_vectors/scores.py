"""What silos answered right on held-out questions, as whole numbers that add up: more coordinates of a masked sum.

One silo's scores are never seen by anybody, only those of all in a sum together; so it is with its silence: who
withholds its scores, or has none to tell, adds zeros.
"""

import math
from dataclasses import astuple, dataclass, fields

from lorica_security.errors import MalformedMessage

LOSS_UNITS = 64
"""A loss counts in units of one over this."""
MOST_LOSS = (1 << 32) - 1
"""No word of a masked vector holds more, whatever a model makes of a silo's questions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of one silo or of a sum. `loss` is loss per token times questions, in `LOSS_UNITS`; `executed` have a result to
    compare with.

    Raises MalformedMessage for counts that contradict each other.
    """

    questions: int = 0
    exact_matches: int = 0
    executed: int = 0
    execution_matches: int = 0
    loss: int = 0

    def __post_init__(self) -> None:
        if min(self.words) < 0:
            raise MalformedMessage(f"scores are {self.words}: none may be negative")
        if max(self.exact_matches, self.executed) > self.questions or self.execution_matches > self.executed:
            raise MalformedMessage(f"scores are {self.words}: more answers are right than there were questions")
        if self.loss and not self.questions:
            raise MalformedMessage(f"scores are {self.words}: a loss without questions")

    @classmethod
    def told(
        cls, *, questions: int, exact_matches: int, executed: int, execution_matches: int, loss_per_token: float
    ) -> "Scores":
        """One silo's, a loss beyond `MOST_LOSS` cut to it. Raises MalformedMessage also for one that is not finite."""
        if not math.isfinite(loss_per_token):
            raise MalformedMessage(f"loss per token is {loss_per_token}: it must be finite")
        return cls(
            questions=questions,
            exact_matches=exact_matches,
            executed=executed,
            execution_matches=execution_matches,
            loss=round(min(loss_per_token * questions * LOSS_UNITS, MOST_LOSS)),
        )

    @property
    def words(self) -> tuple[int, ...]:
        """In the order in which they travel."""
        return astuple(self)

    @property
    def loss_per_token(self) -> float:
        """The mean over questions; NaN without any."""
        return self.loss / LOSS_UNITS / self.questions if self.questions else math.nan

    def capped(self, limit: int) -> "Scores":
        """With no number above `limit`, so that a sum of so many as it is for cannot overflow."""
        return Scores(**{field.name: min(getattr(self, field.name), limit) for field in fields(self)})


NO_SCORES = Scores()
SCORE_WORDS = len(NO_SCORES.words)
