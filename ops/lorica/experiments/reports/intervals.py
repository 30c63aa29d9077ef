"""Paired differences of exact match between two rows of a study, with intervals by bootstrap over seeds and questions.

Both rows answered the same questions with the same seeds. Seeds are drawn again, and the questions of each silo: once
for all seeds, since every seed is asked the same ones, and a question that is hard is hard for each. So the interval is
one of other questions and other seeds; of other silos it says nothing. With a single seed it is of questions alone.
Percentiles of RESAMPLES draws (Efron and Tibshirani, An Introduction to the Bootstrap, 1993).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

RESAMPLES: Final = 2000
_SEED: Final = 1
Right = Mapping[str, str]
"""By silo, a character for each question: 1 where the answer is exact."""
Average = Literal["macro", "micro"]
"""MacroAvg counts each silo the same, MicroAvg each question."""


@dataclass(frozen=True, slots=True)
class Difference:
    """In points of exact match, with its 95 % interval."""

    mean: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.least:+.1f}, {self.most:+.1f}]"


def right_of(test: Mapping[str, Mapping[str, Any]]) -> Right:
    """Of a line's scores, by silo; silos of older lines have none."""
    return {silo: score["right"] for silo, score in test.items() if "right" in score}


def paired(pairs: Sequence[tuple[Right, Right]], *, average: Average = "macro") -> Difference | None:
    """The first of each pair less the second, of one seed each, over the silos that all of them have; None without one.

    Raises ValueError where two answers of a silo are not of the same questions.
    """
    silos = sorted(set.intersection(*(set(right) for pair in pairs for right in pair))) if pairs else []
    if not silos:
        return None
    by_silo = [torch.tensor([_less(one[silo], other[silo]) for one, other in pairs]).double() for silo in silos]
    counts = [len(each[0]) if average == "micro" else 1 for each in by_silo]
    generator = torch.Generator().manual_seed(_SEED)
    seeds = _drawn(len(pairs), generator)
    drawn, exact = torch.zeros(RESAMPLES, dtype=torch.float64), 0.0
    for each, count in zip(by_silo, counts, strict=True):
        share = 100 * count / sum(counts)
        questions = _drawn(each.shape[1], generator)
        drawn += share * ((seeds @ each) * questions).sum(dim=1)
        exact += share * float(each.mean())
    least, most = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Difference(exact, least, most)


def _less(one: str, other: str) -> list[int]:
    return [int(a) - int(b) for a, b in zip(one, other, strict=True)]


def _drawn(of: int, generator: torch.Generator) -> torch.Tensor:
    """(RESAMPLES, of): how large a share of each draw each one is."""
    picked = torch.randint(of, (RESAMPLES, of), generator=generator)
    shares = torch.zeros(RESAMPLES, of, dtype=torch.float64)
    return shares.scatter_add_(1, picked, torch.full(picked.shape, 1 / of, dtype=torch.float64))
