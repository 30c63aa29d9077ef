"""How much of each delta's difference from the centre counts, and the mean of centred clipping for one slab."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import Tensor

from lorica_coordinator.aggregation.streaming_sum import Scratch, weighted_mean
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_security.identifiers import SiloName


def parts(squared_distances: Sequence[float], radius: float) -> list[float]:
    """min(1, radius / distance) for each silo: 1 within the radius."""
    distances = (math.sqrt(square) for square in squared_distances)
    return [1.0 if distance <= radius else radius / distance for distance in distances]


def clipped(cohort: CohortWeights, counted: Sequence[float]) -> CohortWeights:
    """The cohort with the part of its share that `parts` leaves each silo."""
    return replace(
        cohort,
        silos=tuple(
            replace(member, share=member.share * part) for member, part in zip(cohort.silos, counted, strict=True)
        ),
    )


def centred_mean(
    deltas: Iterable[tuple[SiloName, Tensor]],
    centre: Tensor,
    cohort: CohortWeights,
    counted: Sequence[float],
    scratch: Scratch,
) -> Tensor:
    """centre + sum(share * part * (delta - centre)), for one slab, as `scratch.mean`; raises as `weighted_mean`.

    What the parts leave of the shares is the centre's.
    """
    of_centre = math.fsum(member.share * (1.0 - part) for member, part in zip(cohort.silos, counted, strict=True))
    mean = weighted_mean(deltas, clipped(cohort, counted), scratch)
    return mean.add_(scratch.product.copy_(centre).mul_(of_centre))
