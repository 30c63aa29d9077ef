"""Of target `conformity`: each noised sum taken apart into the records that are in it, and how often each is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lorica.privacy_audit.checks import EXACT, NOTHING, Check, none, worst
from lorica.privacy_audit.conformity.audited_trainings import CLIPPED_TO, EXPECTED, Training
from lorica.privacy_audit.conformity.oracle import Oracle

MARGIN = 2.0**-10
"""What the trainer clips below max_grad_norm by, of it (silo_agent/training/private/clipping.py)."""

Floats64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Parts:
    """Of one training: how often each record is in each step's sum, shape (steps,
    records), and what is left of it, over max_grad_norm.
    """

    coefficients: Floats64
    left: float
    divisors: Floats64


@dataclass(frozen=True, slots=True)
class Apart:
    """Takes sums apart. `clipped` has shape (records, parameters), `inverse` is of the matrix of its inner products."""

    clipped: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, oracle: Oracle) -> "Apart":
        clipped = torch.from_numpy(oracle.clipped(CLIPPED_TO * (1 - MARGIN)))
        return cls(clipped, torch.linalg.inv(clipped @ clipped.T))

    def parts(self, totals: Floats64) -> tuple[Floats64, float]:
        """Of sums, shape (steps, parameters), how often each record is in each,
        shape (steps, records), and the longest rest.
        """
        sums = torch.from_numpy(totals)
        found = sums @ self.clipped.T @ self.inverse
        left = torch.linalg.vector_norm(sums - found @ self.clipped, dim=1)
        return found.numpy(), float(left.max())


def parts_of(apart: Apart, training: Training) -> Parts:
    coefficients, left = apart.parts(np.stack([step.total for step in training.tape.steps]))
    divisors = []
    for step in training.tape.steps:
        if not len(step.used):  # nothing was divided here: where it was, the sums say so
            continue
        noised = step.total + step.noise
        divisors.append(float(noised @ noised) / (float(noised @ step.used) or NOTHING))
    return Parts(coefficients, left / CLIPPED_TO, np.array(divisors))


def contribution_checks(about: str, trainings: Sequence[Training], parts: Sequence[Parts]) -> Iterator[Check]:
    drawn = []
    for training, found in zip(trainings, parts, strict=True):
        counts = np.zeros_like(found.coefficients)
        for step, records in enumerate(training.tape.drawn[: len(counts)]):
            np.add.at(counts[step], records, 1.0)
        drawn.append(counts)
    counted, expected = np.concatenate([found.coefficients for found in parts]), np.concatenate(drawn)
    wrong = np.rint(counted) != expected
    yield none(
        "drawn records are in the sum",
        about,
        [f"record {record} of step {step + 1}" for step, record in np.argwhere(wrong | (expected > 1))],
        "records were drawn and not added up, or added up and not drawn, or count twice",
    )
    off = counted - np.clip(np.rint(counted), 0.0, 1.0)
    at, _ = worst(off.ravel())
    record = at % off.shape[1]
    yield Check(
        promise="contribution of a record",
        about=about,
        measured=float(counted.ravel()[at]),
        lowest=-EXACT if counted.ravel()[at] < 0.5 else 1 - EXACT,
        highest=EXACT if counted.ravel()[at] < 0.5 else 1 + EXACT,
        broken=f"record {record} counts in step {at // off.shape[1] + 1} so many times its clipped gradient",
    )
    yield Check(
        promise="nothing but records in the sum",
        about=about,
        measured=max(found.left for found in parts),
        lowest=0.0,
        highest=EXACT,
        broken="of a sum more than this part of max_grad_norm belongs to no record",
    )
    divisors = np.concatenate([found.divisors for found in parts])
    if not len(divisors):
        return
    at, off_divisor = worst(divisors - EXPECTED)
    yield Check(
        promise="public divisor",
        about=about,
        measured=EXPECTED + off_divisor,
        lowest=EXPECTED * (1 - EXACT),
        highest=EXPECTED * (1 + EXACT),
        broken=f"step {at + 1} was divided by another number than the plan's expected_batch_size",
    )
