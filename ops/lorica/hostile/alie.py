"""A little is enough: the honest mean, moved in each parameter by so much of the spread that nobody stands out."""

from statistics import NormalDist
from typing import Final

from lorica.hostile.attack import Attack, Exact, Known

LEAST: Final = 1.5
"""Standard deviations, as in the paper's experiments. Its formula gives none at all for two hostile silos of eight."""


def deviations(silos: int, hostile: int) -> float:
    """How far to go: with s = n / 2 + 1 - f, rounded down, honest silos won over, the z below which a normal value is
    with a chance of (n - f - s) / (n - f); at least LEAST."""
    honest = silos - hostile
    chance = (honest - (silos // 2 + 1 - hostile)) / honest
    return max(NormalDist().inv_cdf(chance) if 0 < chance < 1 else 0.0, LEAST)


def a_little(known: Known) -> Exact:
    """The mean minus z standard deviations."""
    return known.mean - deviations(known.silos, known.hostile) * known.spread


ALIE: Final = Attack(
    name="alie",
    meaning="the honest mean minus 1.5 standard deviations of each parameter, or more where the number of silos allows",
    source="Baruch, Baruch and Goldberg, A Little Is Enough, NeurIPS 2019",
    delta=a_little,
)
