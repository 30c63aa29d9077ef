"""Centred clipping: every delta counts as far as `clipping_radius` from the mean of the round before, and no further.

Karimireddy, He and Jaggi, Learning from History for Byzantine Robust Optimization, ICML 2021, algorithm 2 with one
iteration. With v the mean of the round before, zero at first, and tau the radius, the mean of n silos is

    v + 1/n x sum of (delta - v) x min(1, tau / |delta - v|)

The paper clips the momentum of workers, which changes little from step to step. A delta here is of a whole round, many
steps long, and takes its place; the paper's proof of convergence is not one for it.

What it promises, whatever silos send and know: the mean is within tau of v, and each hostile silo moves it by at most
tau / n from where the others and v take it. That holds for any number of hostile silos. A radius that honest deltas
keep within costs nothing; one much smaller makes the model slow, since the mean goes no further than tau from v in a
round.

The centre lies beside the model that it belongs to, as the server optimizer's state does, and becomes durable with it:
a round that is done again begins from the same one. Where a round leaves the model as it was, by a mean of zeros, that
model keeps the centre it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final

import numpy as np
from torch import Tensor

from lorica_coordinator.aggregation.centred_clipping import centred_mean, clipped, parts
from lorica_coordinator.aggregation.squared_distances import Piece, to_centre
from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_coordinator.edges.sums.next_model import BaseModel
from lorica_coordinator.edges.sums.reducers.reducer import (
    Robust,
    blamed_on_the_longest,
    result_of,
    spools_of,
)
from lorica_coordinator.edges.sums.spool_pieces import pieces
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from lorica_coordinator.vectors.stored_vector import VectorReader
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import CENTRE, CENTRED_CLIPPING
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.server_optimizer import ServerOptimizer


class CentredClipping(Robust):
    rule = CENTRED_CLIPPING
    passes: Final = 2

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Measure, clip and average. Raises what every reducer raises, and StateError for fewer silos than the rule
        needs."""
        cohort = self._cohort(committed)
        base = self._into.base(base_model)
        spools = spools_of(self._spools, key, committed)
        rows = pieces(spools, cohort, self._form, base.elements)
        with blamed_on_the_longest(committed):
            squares = to_centre([member.silo for member in cohort.silos], _beside_the_centre(rows, base))
            counted = parts(squares.tolist(), self._section.clipping_radius)
            deltas = self._deltas(spools, partial(_step, cohort, counted))
            model, rate = self._into.made(base, deltas, round_number=key.round, silos=len(committed))
        cut = [part < 1.0 for part in counted]
        return result_of(model, Outcome.APPLIED, clipped(cohort, counted), rate=rate, cut=cut)


def _beside_the_centre(rows: Iterator[Piece], base: BaseModel) -> Iterator[tuple[Piece, Piece]]:
    """Each piece with the same stretch of the centre."""
    if not base.state.steps:
        yield from ((piece, np.zeros(piece.shape[1], dtype="<f4")) for piece in rows)
        return
    with closing(VectorReader(base.state.slots[CENTRE])) as reader:
        for piece in rows:
            centre = np.empty(piece.shape[1], dtype="<f4")
            reader.read_into(centre.view(np.uint8).data)
            yield piece, centre


def _step(
    cohort: CohortWeights,
    counted: Sequence[float],
    model: Tensor,
    slabs: Iterator[Tensor],
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    step_number: int,
    scratch: Scratch,
) -> None:
    named = zip((silo.silo for silo in cohort.silos), slabs, strict=True)
    mean = centred_mean(named, state[CENTRE], cohort, counted, scratch)
    state[CENTRE].copy_(mean)
    of_optimizer = {name: slab for name, slab in state.items() if name != CENTRE}
    apply_mean(model, mean, optimizer, of_optimizer, step_number=step_number, scratch=scratch.product)
