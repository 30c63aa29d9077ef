"""Of target `conformity`: the noised weight of a round, beside the losses that it is made of."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from lorica.privacy_audit.checks import EXACT, Check, none, spread_limits, worst
from lorica.privacy_audit.conformity.audited_trainings import Training, World
from lorica.privacy_audit.conformity.tape import Weight


def weight_checks(world: World, about: str, trainings: Sequence[Training]) -> Iterator[Check]:
    taken = [training.name for training in trainings if len(training.tape.weights) != 1]
    yield none("one weight a round", about, taken, "a round released more or fewer noised weights than one")
    weights: list[Weight] = [training.tape.weights[0] for training in trainings if training.tape.weights]
    if not weights:
        return
    bounded = np.minimum(world.oracle.losses, world.loss_bound)
    exact = sum(float(bounded[list(unit)].mean()) for unit in trainings[0].units)
    sums = np.concatenate([weight.sums for weight in weights])
    at, _ = worst(sums - exact)
    yield Check(
        promise="loss bound",
        about=about,
        measured=float(sums[at]),
        lowest=exact * (1 - EXACT),
        highest=exact * (1 + EXACT),
        broken="the sum of losses in a weight is not that of losses cut at the plan's loss_bound",
    )
    told = [
        training.name
        for training, weight in zip(trainings, weights, strict=False)
        if not math.isclose(training.summary.examples * training.summary.loss_max, weight.released, rel_tol=1e-9)
    ]
    yield none("noised weight", about, told, "the weight that leaves is not the one that noise was added to")
    noise = np.concatenate([weight.noise for weight in weights])
    promised = next(
        (entry.release.noise_multiplier for entry in trainings[0].entries if entry.mechanism == "loss_reduction"), 0.0
    )
    low, high = (math.sqrt(limit) for limit in spread_limits(len(noise)))
    yield Check(
        promise="weight's noise",
        about=about,
        measured=float(np.sqrt(np.square(noise).mean())) / ((promised or 1.0) * world.loss_bound),
        lowest=low,
        highest=high,
        broken="noise on a weight is not as large as the ledger's multiplier times loss_bound, as a part of it",
    )
    released = [weight.released for weight in weights if weight.released > 0.0]
    yield none(
        "fresh noise on weights",
        about,
        [str(one) for one in set(released) if released.count(one) > 1],
        "two trainings released the very same weight",
    )
