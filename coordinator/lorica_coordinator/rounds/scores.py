"""Means of exact match over silos, and which model is best by them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lorica_security.secure_aggregation.masked_vectors.scores import Scores
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation


def macro_average(evaluations: Sequence[Evaluation]) -> float:
    """MacroAvg exact match, 0 to 1: every silo counts the same. At least one evaluation."""
    return sum(item.exact_matches / item.examples for item in evaluations) / len(evaluations)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestModel:
    """The model with the highest MicroAvg exact match so far; counts over all silos, so that comparison is exact."""

    model: Digest
    round: int
    exact_matches: int
    examples: int

    @classmethod
    def scored(cls, model: Digest, round_number: int, evaluations: Sequence[Evaluation]) -> "BestModel":
        return cls(
            model=model,
            round=round_number,
            exact_matches=sum(item.exact_matches for item in evaluations),
            examples=sum(item.examples for item in evaluations),
        )

    @classmethod
    def summed(cls, model: Digest, round_number: int, scores: Scores) -> "BestModel":
        """Of a sum over silos; there were questions."""
        return cls(model=model, round=round_number, exact_matches=scores.exact_matches, examples=scores.questions)

    @property
    def micro_average(self) -> float:
        """MicroAvg exact match, 0 to 1: every example counts the same."""
        return self.exact_matches / self.examples

    def beats(self, other: "BestModel | None") -> bool:
        """Whether this one takes the place of `other`, an earlier one. So does a tie: the later has learnt for longer,
        and while nothing is answered right yet the untrained model must not count as the best."""
        return other is None or self.exact_matches * other.examples >= other.exact_matches * self.examples
