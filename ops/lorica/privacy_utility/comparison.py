"""Ideas for more accuracy at the same epsilon, each beside a training as it is today: paired differences, with
intervals.

The loss of a token is what decides; exact match counts whole queries, and moves by chance. A pair has the same seed and
epsilon, that is the same records, held-out questions, warm start and plan seed; the noise of each is its own, since it
comes from the operating system.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev, variance
from typing import Final

from rich.table import Table

from lorica.privacy_utility.rows import TODAY, Row

VARIANTS: Final[Mapping[str, Mapping[str, object]]] = {
    TODAY: {},
    "average": {"privacy.average_decay": 0.9999},
    "large-batch": {"privacy.expected_batch_size": 2000},
    "augmented": {"privacy.augmentations": 4},
    "corrected": {"training.optimizer": "adam_corrected"},
    "corrected-slower": {"training.optimizer": "adam_corrected", "training.learning_rate": 3e-3},
    "both": {"privacy.average_decay": 0.9999, "training.optimizer": "adam_corrected"},
}
"""What a plan has otherwise. "corrected-slower" is for steps that are up to three times as long: its rate is a third.
The noise multiplier is found anew for each, so that a large batch has the same epsilon."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean over pairs, and half of its 95 % interval: infinite where it cannot be told."""

    mean: float
    half: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Difference":
        """Of one a seed, by Student's t: what another seed, with other records, questions and noise, may give."""
        count = len(differences)
        half = student(count - 1) * stdev(differences) / math.sqrt(count) if count > 1 else math.inf
        return cls(fmean(differences), half)

    @classmethod
    def over_questions(cls, pairs: "Sequence[tuple[Row, Row]]") -> "Difference":
        """Of exact match, by the normal distribution: what other questions may give to these very models, silos
        weighing alike."""
        means, variances = [], []
        for row, other in pairs:
            for silo, right in row.right.items():
                differences = [int(one) - int(two) for one, two in zip(right, other.right.get(silo, ""), strict=True)]
                means.append(fmean(differences))
                variances.append(variance(differences) / len(differences))
        if not means:
            return cls(math.nan, math.inf)
        return cls(fmean(means), NormalDist().inv_cdf(0.975) * math.sqrt(sum(variances)) / len(means))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Of `variant` at `epsilon` less today's, over the `seeds` that have both."""

    variant: str
    records: int
    epsilon: float
    seeds: tuple[int, ...]
    loss_per_token: Difference
    exact_match: Difference
    exact_match_over_questions: Difference


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, `freedom` from 1."""
    from scipy.stats import t  # here, not above: it takes a second, and commands that only list themselves do without

    return float(t.ppf(0.975, freedom))


def comparisons(rows: Sequence[Row], beside: float | None = None) -> Iterator[Comparison]:
    """Of each variant that has a pair, by records and epsilon, in the order of `rows`; less today's at the same
    epsilon, or at epsilon `beside`, where that is another one."""
    today = {(row.data, row.records, row.epsilon, row.seed): row for row in rows if row.variant == TODAY}
    left_out = {TODAY} if beside is None else set()
    settings = dict.fromkeys(
        (row.variant, row.data, row.records, row.epsilon)
        for row in rows
        if row.variant not in left_out and row.epsilon != beside
    )
    for variant, data, records, epsilon in settings:
        pairs = [
            (row, other)
            for row in rows
            if (row.variant, row.data, row.records, row.epsilon) == (variant, data, records, epsilon)
            and (other := today.get((data, records, epsilon if beside is None else beside, row.seed)))
        ]
        if pairs:
            yield Comparison(
                variant=variant,
                records=records,
                epsilon=epsilon,
                seeds=tuple(row.seed for row, _ in pairs),
                loss_per_token=Difference.of([row.loss_per_token - other.loss_per_token for row, other in pairs]),
                exact_match=Difference.of([row.exact_match - other.exact_match for row, other in pairs]),
                exact_match_over_questions=Difference.over_questions(
                    [(row, other) for row, other in pairs if row.right and other.right]
                ),
            )


def comparison_table(found: Sequence[Comparison]) -> Table:
    title = "beside today's at the same epsilon and seeds: mean difference, 95 % interval"
    table = Table(title=title, title_style="dim")
    for column in ("variant", "records", "epsilon", "pairs", "loss a token", "exact match", "over questions alone"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for one in found:
        match, loss, asked = one.exact_match, one.loss_per_token, one.exact_match_over_questions
        table.add_row(
            one.variant,
            f"{one.records:,}",
            f"{one.epsilon:g}",
            str(len(one.seeds)),
            f"{loss.mean:+.3f} ± {loss.half:.3f}",
            f"{100 * match.mean:+.1f} ± {100 * match.half:.1f} points",
            "" if math.isinf(asked.half) else f"± {100 * asked.half:.1f}",
        )
    return table
