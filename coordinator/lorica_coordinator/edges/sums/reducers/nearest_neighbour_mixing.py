"""Nearest-neighbour mixing before a trimmed mean: each delta becomes the mean of the n - f nearest to it, itself among
them.

Allouah, Farhadkhani, Guerraoui, Gupta, Pinot and Stephan, Fixing by Mixing: A Recipe for Optimal Byzantine ML under
Heterogeneity, AISTATS 2023, algorithm 2. f hostile silos are assumed, of n >= 2f + 1. Mixed deltas of honest silos are
nearer to each other than these are, so the rule after it has less to choose among. It is the trimmed mean here, with f
left out at either end.

What it promises, where at most f silos are hostile, whatever they send and know: with s the root of the mean squared
distance of n - f honest deltas from their mean, the result is within mixing_reach (proto/silo_wire/plans/robust.py)
times s of that mean (lemma 1 and proposition 2 there). Where honest silos agree, so does it; where their data differ,
what most of them share is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Final

import torch
from torch import Tensor

from lorica_coordinator.aggregation.neighbour_mixing import mixed, nearest
from lorica_coordinator.aggregation.squared_distances import between
from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.trimmed_mean import gathered, trimmed_mean
from lorica_coordinator.aggregation.weighting import CohortWeights
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.masked_sum import SpoolReader
from lorica_coordinator.edges.sums.next_model import Deltas, NextModel
from lorica_coordinator.edges.sums.reducers.reducer import blamed_on_the_longest, equal_weights, result_of, spools_of
from lorica_coordinator.edges.sums.reducers.trimmed_mean import MOST_BYTES
from lorica_coordinator.edges.sums.spool_pieces import pieces
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome
from silo_wire.algorithm import Number, Promise
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.robust import NEAREST_NEIGHBOUR_MIXING
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.server_optimizer import ServerOptimizer


class NearestNeighbourMixing:
    """`dtype` is the type of the committed deltas."""

    name: ClassVar[str] = NEAREST_NEIGHBOUR_MIXING.name
    meaning: ClassVar[str] = NEAREST_NEIGHBOUR_MIXING.meaning
    needs: Final = frozenset({Number.DELTA_NORM})
    masks: Final = ""
    promises: Final = frozenset[Promise]({"record"})
    passes: Final = 2

    def __init__(self, section: AggregationSection, *, spools: Spools, dtype: torch.dtype, into: NextModel) -> None:
        self._section = section
        self._spools = spools
        self._dtype = dtype
        self._into = into

    def reduce(self, key: RoundKey, base_model: Digest, committed: Sequence[CommittedUpdate]) -> AggregationResult:
        """Measure, mix, sort and average. Raises what every reducer raises, and StateError for fewer silos than the
        rule needs."""
        cohort = equal_weights(NEAREST_NEIGHBOUR_MIXING, self._section, committed)
        count, hostile = len(cohort.silos), self._section.hostile_silos
        base = self._into.base(base_model)
        spools = spools_of(self._spools, key, committed)
        most = max(1, min(MOST_BYTES // (2 * torch.float32.itemsize * count), base.elements))
        slab_elements = min(most, self._into.slab_elements)
        tables = torch.empty((2, count, slab_elements), dtype=torch.float32, device=self._into.device)
        with blamed_on_the_longest(committed):
            names = [member.silo for member in cohort.silos]
            with_which = nearest(between(names, pieces(spools, cohort, self._dtype, base.elements)), hostile)
            deltas = Deltas(
                sources=[partial(SpoolReader, *spool) for spool in spools],
                dtype=self._dtype,
                step=partial(_step, cohort, tables, with_which, hostile),
                most_elements=slab_elements,
            )
            model = self._into.made(base, deltas, round_number=key.round)
        return result_of(model, Outcome.APPLIED, cohort)


def _step(
    cohort: CohortWeights,
    tables: Tensor,
    with_which: Sequence[Sequence[int]],
    hostile: int,
    model: Tensor,
    slabs: Iterator[Tensor],
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    step_number: int,
    scratch: Scratch,
) -> None:
    rows, after = tables[:, :, : model.numel()].unbind(0)
    gathered(zip((silo.silo for silo in cohort.silos), slabs, strict=True), cohort, rows)
    mean = trimmed_mean(mixed(rows, with_which, after), hostile, scratch.mean)
    apply_mean(model, mean, optimizer, state, step_number=step_number, scratch=scratch.product)
