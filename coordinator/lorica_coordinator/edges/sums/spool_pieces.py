"""The same stretch of every silo's spooled delta, piece by piece, as the rules read it that compare whole deltas."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Final

import numpy as np
import torch

from lorica_coordinator.aggregation.squared_distances import BLOCK, Piece
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_coordinator.edges.sums.delta_source import DeltaForm
from lorica_coordinator.edges.sums.masked_sum import Spooled

PIECE_ELEMENTS: Final = 4 * BLOCK
"""Of each silo: 2 MB of 32 silos at a time."""


def pieces(spools: Sequence[Spooled], cohort: CohortWeights, form: DeltaForm, elements: int) -> Iterator[Piece]:
    """A row for each silo of the cohort, in its order, float32, scaled where its norm was capped; each piece is good
    until the next is asked for.

    `spools` are in the same order and hold `elements` numbers of `form`. Raises UnusableUpdate naming the silo.
    """
    rows = torch.empty((len(spools), PIECE_ELEMENTS), dtype=torch.float32)
    read = torch.empty(PIECE_ELEMENTS, dtype=form.dtype)
    with ExitStack() as opened:
        readers = [opened.enter_context(closing(form.open(*spool))) for spool in spools]
        for first in range(0, elements, PIECE_ELEMENTS):
            length = min(PIECE_ELEMENTS, elements - first)
            for reader, member, row in zip(readers, cohort.silos, rows, strict=True):
                reader.read_into(read[:length].view(torch.uint8).numpy().data)
                row[:length].copy_(read[:length])
                if member.delta_scale != 1.0:
                    row[:length].mul_(member.delta_scale)
            yield np.ascontiguousarray(rows[:, :length].numpy())
