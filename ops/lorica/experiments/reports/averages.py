"""The paper's two averages of a score over silos: MacroAvg counts each silo the same, MicroAvg each example."""

import statistics
from collections.abc import Collection, Mapping

Score = Mapping[str, float]
"""Of one silo's test split (scoring.py)."""


def macro_average(scores: Collection[Score], of: str) -> float:
    return statistics.fmean(score[of] for score in scores)


def micro_average(scores: Collection[Score], of: str) -> float:
    """Of execution accuracy the examples are those whose own query the database could run."""
    counts = [
        score.get("executed", score["examples"]) if of == "execution_accuracy" else score["examples"]
        for score in scores
    ]
    return float(sum(score[of] * count for score, count in zip(scores, counts, strict=True)) / sum(counts))
