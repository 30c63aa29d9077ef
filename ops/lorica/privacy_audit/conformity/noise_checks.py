"""Of target `conformity`: whether noise is as large as the ledger says,
Gaussian, on each number, and each draw by itself.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lorica.privacy_audit.checks import (
    EXACT,
    FALSE_ALARM,
    NOTHING,
    Check,
    beyond,
    correlation_limit,
    distance_from_normal,
    distance_limit,
    mean_products,
    none,
    rare,
    spread_limits,
    worst,
)
from lorica.privacy_audit.conformity.audited_trainings import CLIPPED_TO, Training

NOISE = 0.01
"""Relative: how far a step's noise may be off."""
TAIL = 4.0

Floats = NDArray[np.float32]


def noise_checks(about: str, trainings: Sequence[Training]) -> Iterator[Check]:
    noise = _normalised(trainings)
    steps, size = noise.shape
    scales = np.sqrt(np.mean(np.square(noise, dtype=np.float64), axis=1)).clip(min=NOTHING)
    at, off = worst(scales - 1)
    low, high = (math.sqrt(limit) for limit in spread_limits(size, FALSE_ALARM / steps))
    yield Check(
        promise="noise scale",
        about=about,
        measured=1 + off,
        lowest=min(1 - NOISE, low),  # of so many numbers as VOCABULARY makes it is the former
        highest=max(1 + NOISE, high),
        broken=f"noise of step {at + 1} is not as large as the ledger's multiplier times max_grad_norm, as a part "
        "of it",
    )
    yield Check(
        promise="noise distribution",
        about=about,
        measured=max(distance_from_normal(row / scale) for row, scale in zip(noise, scales, strict=True)),
        lowest=0.0,
        highest=distance_limit(size, steps) + NOISE / 4,
        broken="noise is not distributed as a Gaussian, by Kolmogorov's distance",
    )
    fewest, most = rare(noise.size * beyond(TAIL))
    yield Check(
        promise="noise distribution",
        about=f"{about}, tails",
        measured=int((np.abs(noise / scales[:, None]) > TAIL).sum()),
        lowest=fewest,
        highest=most,
        broken=f"of {noise.size:,} draws another number than a Gaussian's is beyond {TAIL:g} deviations",
    )
    sizes = trainings[0].tape.sizes
    faults = []
    for tensor, part in enumerate(np.split(noise, np.cumsum(sizes)[:-1], axis=1)):
        low_square, high_square = spread_limits(part.size, FALSE_ALARM / len(sizes))
        square = float(np.mean(np.square(part, dtype=np.float64)))
        silent = float(np.mean(part == 0.0))
        if not (low_square * (1 - NOISE) <= square <= high_square * (1 + NOISE)) or silent > EXACT:
            faults.append(f"tensor {tensor}")
    yield none("noise on every parameter", about, faults, "noise is missing, or of another size, on some parameters")
    yield Check(
        promise="noise independent of itself",
        about=about,
        measured=max(_own_correlation(row) for row in noise),
        lowest=0.0,
        highest=correlation_limit(size, steps * size) + EXACT,
        broken="noise on one parameter of a step is like that on another one",
    )
    yield _between_tensors(about, noise, sizes)


def _normalised(trainings: Sequence[Training]) -> Floats:
    """Noise over the deviation that the ledger promises, shape (steps, parameters)."""
    rows = [
        step.noise / np.float32((training.gradients.noise_multiplier or 1.0) * CLIPPED_TO)
        for training in trainings
        for step in training.tape.steps
    ]
    noise: Floats = np.stack(rows)
    return noise


def _own_correlation(row: Floats) -> float:
    """The largest mean product of a row with itself shifted."""
    power = np.square(np.abs(np.fft.rfft(row.astype(np.float64))))
    products = np.fft.irfft(power, len(row))
    return float(np.abs(products[1:]).max() / max(products[0], NOTHING))


def _between_tensors(about: str, noise: Floats, sizes: Sequence[int]) -> Check:
    """Tensors whose noise began with the same draws would be alike in their first numbers."""
    parts = np.split(noise, np.cumsum(sizes)[:-1], axis=1)
    pairs = list(combinations(parts, 2))
    excess = 0.0
    for one, other in pairs:
        count = min(one.shape[1], other.shape[1])
        product = float(np.mean(one[:, :count] * other[:, :count], dtype=np.float64))
        excess = max(excess, abs(product) / correlation_limit(count * len(noise), len(pairs)))
    return Check(
        promise="noise independent of itself",
        about=f"{about}, tensors",
        measured=excess,
        lowest=0.0,
        highest=1.0,
        broken="two tensors have like noise, over what chance allows",
    )


def independence_checks(trainings: Sequence[Training]) -> Iterator[Check]:
    """Of noise, over steps, rounds, silos, restarts and plans."""
    rows = [(f"step {step + 1} of {each.name}", each) for each in trainings for step in range(len(each.tape.steps))]
    if len(rows) < 2:
        return
    noise = np.concatenate([_normalised([training]) for training in trainings if training.tape.steps])
    noise /= np.sqrt(np.mean(np.square(noise), axis=1, keepdims=True)).clip(min=NOTHING)
    at, most = worst(mean_products(noise).ravel())
    one, other = divmod(at, len(rows))
    yield Check(
        promise="independent noise",
        about="steps, rounds, silos and restarts",
        measured=abs(most),
        lowest=0.0,
        highest=correlation_limit(noise.shape[1], len(rows) ** 2) + EXACT,
        broken=f"noise of {rows[one][0]} is correlated with that of {rows[other][0]}",
    )
