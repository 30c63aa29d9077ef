"""Nearest-neighbour mixing: which deltas each is mixed with, from squared distances alone, and the mixing of a slab."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lorica_security.errors import StateError


def nearest(distances: NDArray[np.float64], hostile: int) -> list[list[int]]:
    """Of each delta the places of the n - f nearest, itself among them, in order; of equally near ones those that come
    first.

    `distances` is square, symmetric and in the order of the silos. Raises StateError for fewer than 2f + 1.
    """
    silos = len(distances)
    if silos < 2 * hostile + 1:
        raise StateError(f"{silos} silos are too few to mix with {hostile} hostile ones: abandon the round")
    found = []
    for index, row in enumerate(distances.tolist()):
        by_distance = sorted(range(silos), key=lambda other: (other != index, row[other], other))
        found.append(sorted(by_distance[: silos - hostile]))
    return found


def mixed(rows: Tensor, with_which: Sequence[Sequence[int]], out: Tensor) -> Tensor:
    """Each row of `out` becomes the mean of those rows that `with_which` names for it, added in float64 in order and
    rounded to float32 once."""
    total = torch.empty(rows.shape[1], dtype=torch.float64, device=rows.device)
    for row, places in zip(out, with_which, strict=True):
        total.zero_()
        for place in places:
            total.add_(rows[place])
        row.copy_(total.div_(len(places)))
    return out
