"""Of target `conformity`: whether who is in which step was drawn as the ledger says, each unit by a coin of its own."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lorica.privacy_audit.checks import FALSE_ALARM, Check, binomial, likely, sizes_spread, worst
from lorica.privacy_audit.conformity.audited_trainings import Training

Truths = NDArray[np.bool_]


def sample_checks(about: str, trainings: Sequence[Training], present: Sequence[Truths]) -> Iterator[Check]:
    """`present` says of each training which record is in which step."""
    units = trainings[0].units
    rate = trainings[0].gradients.sampling_rate
    of_units = [np.stack([here[:, list(unit)].sum(axis=1) for unit in units], axis=1) for here in present]
    several = sum(int((here > 1).sum()) for here in of_units)
    yield Check(
        promise="one record of a unit",
        about=about,
        measured=several,
        lowest=0,
        highest=0,
        broken="so often a unit has more than one record in a step",
    )
    sampled = [here > 0 for here in of_units]
    every = np.concatenate(sampled)
    steps, count = every.shape
    low, high = likely(binomial(every.size, rate))
    yield Check(
        promise="sampling rate",
        about=about,
        measured=int(every.sum()),
        lowest=low,
        highest=high,
        broken=f"of {every.size} units and steps so many were sampled: not at the ledger's rate of {rate:g}",
    )
    centre, probabilities = sizes_spread(count, rate, steps)
    low, high = likely(probabilities)
    yield Check(
        promise="Poisson samples",
        about=about,
        measured=float(np.square(every.sum(axis=1) - centre).sum()),
        lowest=low,
        highest=high,
        broken="the sizes of samples vary otherwise than where each unit has a coin of its own",
    )
    low, high = likely(binomial(steps, rate), FALSE_ALARM / count)
    often = every.sum(axis=0)
    at, _ = worst(often - steps * rate)
    yield Check(
        promise="every unit alike",
        about=about,
        measured=int(often[at]),
        lowest=low,
        highest=high,
        broken=f"unit {at} is sampled more or less often than others",
    )
    yield from _fresh(about, sampled, rate)
    if any(len(unit) > 1 for unit in units):
        yield _members(about, units, present)


def _fresh(about: str, sampled: Sequence[Truths], rate: float) -> Iterator[Check]:
    """Two samples agree on a unit as often as two coins of the rate do; pairs do not overlap."""
    agree = rate**2 + (1 - rate) ** 2
    within = [here[: len(here) // 2 * 2 : 2] == here[1::2] for here in sampled if len(here) > 1]
    between = [one == other for one, other in zip(sampled[::2], sampled[1::2], strict=False) if len(one) == len(other)]
    for what, equal in (("steps", within), ("trainings", between)):
        if not equal:
            continue
        trials = sum(one.size for one in equal)
        low, high = likely(binomial(trials, agree))
        yield Check(
            promise="fresh samples",
            about=f"{about}, {what}",
            measured=sum(int(one.sum()) for one in equal),
            lowest=low,
            highest=high,
            broken=f"of {trials} pairs of coins in two {what} so many fell alike",
        )


def _members(about: str, units: Sequence[Sequence[int]], present: Sequence[Truths]) -> Check:
    """Of each draw from a unit of several records, whether it took the first: each with a probability of its own."""
    every = np.concatenate(list(present))
    first, drawn = 0, 0
    probabilities = np.ones(1)
    for unit in units:
        here = every[:, list(unit)]
        if len(unit) == 1:
            continue
        first += int(here[:, 0].sum())
        drawn += int(here.sum())
        for _ in range(int(here.sum())):
            probabilities = np.convolve(probabilities, [1 - 1 / len(unit), 1 / len(unit)])
    low, high = likely(probabilities)
    return Check(
        promise="records of a unit alike",
        about=about,
        measured=first,
        lowest=low,
        highest=high,
        broken=f"of {drawn} draws from units of several records so many took the first one",
    )
