"""What masking costs a silo and unmasking the coordinator, in one process, through the functions that they run, over
real files.

Two silos are masked as their agents would do it, and measured. What the others would send is there as its sum
(stand_ins.py): in the place of the first of them, with words of zero in the place of each further one. So the
coordinator reads a vector for each silo, adds up all of them and takes off every mask, as it would; what comes out is
compared with the mean of all deltas. There are five vectors on disk, and three models, whatever the number of silos.

The two silos that are lost in the second sum are of those others, with a sum of their own.
"""

import math
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lorica.bench.masked.attempt import sum_of
from lorica.bench.masked.checks import Coordinator, ModelCheck, Shown, checked_by
from lorica.bench.masked.costs import Cost, measured
from lorica.bench.masked.deltas import Deltas
from lorica.bench.masked.hybrid import watched
from lorica.bench.masked.stand_ins import BLOCK, Encoded, blocks, write_delta, write_sum, write_zeros
from lorica.bench.peers.layout import layout as t5_tensors
from lorica.secure_aggregation.in_memory import FEDERATION, PLAN, ROUND, AttemptInMemory
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.aggregator import SLAB_BYTES, Aggregator
from lorica_coordinator.edges.sums.masked_sum import MaskedVectors, MeanReader
from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_coordinator.vectors import model_file
from lorica_coordinator.vectors.stored_vector import StoredVector, VectorReader
from lorica_security.errors import StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.effects import Unmask
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FloatBlock, WideBlock
from lorica_security.secure_aggregation.parameters import Terms
from silo_agent.training.update.masked_vector import KeptDelta, write_masked_vector
from silo_wire.canonical import Digest
from silo_wire.checked_chunk import StepRule
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.messages import RoundKey, TrainingSummary
from silo_wire.plans.masked_ranges import plan_ranges
from silo_wire.plans.plan_optimizer import optimizer_of
from silo_wire.plans.sections.aggregation import AggregationSection

MEASURED = 2
"""Silos that are masked one by one."""
LOST = 2
WORST_ERROR = 1e-4
"""Relative L2 error from which on a sum counts as wrong."""
FILES = 9
"""Vectors and models on disk, at most."""
_KEY = RoundKey(federation=FEDERATION, plan=PLAN, round=ROUND, attempt=1)
_ZEROS = bytes(4 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmasked:
    """`mean`: from the vectors on disk to the mean delta; `aggregate`: to the next model on disk. The error is that of
    the mean delta."""

    mean: Cost
    aggregate: Cost
    relative_l2_error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskFigures:
    """`keys` is of all silos and the coordinator together: everything but masking and unmasking.

    `mask` is the mean over the silos measured, from the delta on disk to the vector on disk; `plain` the aggregation of
    as many plain updates. `spot` and `joint`: what a silo does that checks the model of the whole sum. `lost`: with two
    silos lost after they had shared keys; None where so few silos give no sum then.
    """

    silos: int
    parameters: int
    keys: Cost
    kem_cpu_s: float
    mask: Cost
    plain: Cost
    spot: ModelCheck
    joint: ModelCheck
    whole: Unmasked
    lost: Unmasked | None


def measure(work: Path, *, silos: int, parameters: int) -> MaskFigures:
    """In the empty folder `work`; raises StateError when what comes out is not the mean of the deltas."""
    cohort = _Cohort(work, silos, parameters)
    link = first_link(FEDERATION, Partition.singletons(cohort.names))
    terms = Terms(model=bytes.fromhex(cohort.base), ranges=cohort.ranges, link=link)
    (attempt, kem_cpu_s), keys = measured(lambda: watched(lambda: AttemptInMemory(cohort.names, terms)))
    lost = LOST if silos - LOST >= max(terms.parameters(cohort.names).least_sum, MEASURED + 1) else 0
    masking = [cohort.mask(silo, attempt) for silo in range(MEASURED)]
    plain = cohort.sum_plain()
    cohort.stand_in(range(MEASURED, silos - lost), attempt)
    cohort.stand_in(range(silos - lost, silos), attempt)
    whole, spot, joint = cohort.unmask(range(silos), attempt), *cohort.check(range(silos), attempt)
    return MaskFigures(
        silos=silos,
        parameters=cohort.parameters,
        keys=keys,
        kem_cpu_s=kem_cpu_s,
        mask=Cost(
            cpu_s=sum(one.cpu_s for one in masking) / MEASURED,
            wall_s=sum(one.wall_s for one in masking) / MEASURED,
            peak_bytes=max(one.peak_bytes for one in masking),
        ),
        plain=plain,
        whole=whole,
        spot=spot,
        joint=joint,
        lost=cohort.unmask(range(silos - lost), attempt) if lost else None,
    )


class _Cohort:
    """Silos, counted from 0, and the coordinator's files below `work`."""

    def __init__(self, work: Path, silos: int, parameters: int) -> None:
        tensors = sorted((TensorSpec(*tensor) for tensor in t5_tensors(parameters)), key=lambda tensor: tensor.name)
        self._work = work
        self._layout = Layout("float32", tuple(tensors))
        self._deltas = Deltas(silos, [tensor.elements for tensor in tensors])
        self.parameters = self._layout.parameters
        self.names = [SiloName(f"silo-{index:02}") for index in range(silos)]
        section = AggregationSection.model_validate(
            {
                "secure_aggregation": True,
                "momentum": 0.0,
                "weighting": "size",
                "max_weight": max(self._deltas.weights),
            }
        )
        self._section = section
        self.ranges = plan_ranges(section, self._layout)
        self._models = _models(work, self._layout)
        self.base = self._models.initial()
        self._spools = _Spools(work / "spools")
        self._vectors: dict[int, StoredVector] = {}
        self._zeros: StoredVector | None = None
        self._delta: KeptDelta | None = None
        self._aggregator = Aggregator(
            section, models=self._models, spools=self._spools, update_dtype="float32", device=torch.device("cpu")
        )

    def mask(self, silo: int, attempt: AttemptInMemory) -> Cost:
        """As its agent does in a later round: it has just written the delta, and the vector goes over that of the round
        before."""
        self._delta = delta = write_delta(self._work / "delta", self._deltas, silo, self._layout)
        path = self._work / f"{silo}.masked"
        shutil.copyfile(delta.file, path)
        work = attempt.works[self.names[silo]]
        written, cost = measured(lambda: write_masked_vector(path, work, delta, weight=self._deltas.weights[silo]))
        self._vectors[silo] = StoredVector(path, 0, written.manifest, written.mark)
        return cost

    def stand_in(self, silos: range, attempt: AttemptInMemory) -> None:
        """The vectors of `silos`, which may be none."""
        if not silos:
            return
        several = [Encoded(silo, attempt.works[self.names[silo]]) for silo in silos]
        self._vectors[silos[0]] = write_sum(self._work / f"{silos[0]}.masked", self._deltas, several)
        if silos[1:] and self._zeros is None:
            self._zeros = write_zeros(self._work / "zeros.masked", several[0].work.fixed_point.words)
        self._vectors.update((silo, self._zeros) for silo in silos[1:] if self._zeros is not None)

    def sum_plain(self) -> Cost:
        """The aggregation of a plain update for each silo, all of them the delta that was written last."""
        delta = self._delta
        assert delta is not None, "a silo was masked"
        update = StoredVector(delta.file, 0, delta.manifest, delta.mark)
        self._spools.vectors = dict.fromkeys(self.names, update)
        summary = TrainingSummary(
            examples=10, loss_max=1.0, loss_min=0.0, loss_first=1.0, loss_last=0.0, optimizer_steps=1, seconds=0.0
        )
        updates = [
            CommittedUpdate(silo=name, digest=delta.manifest.digest, summary=summary, delta_norm=1.0)
            for name in self.names
        ]
        self._aggregator.aggregate(_KEY, self.base, updates[:1])  # later rounds write over the files of earlier ones
        self._models.retain({self.base})
        _, cost = measured(lambda: self._aggregator.aggregate(_KEY, self.base, updates))
        self._models.retain({self.base})
        return cost

    def unmask(self, survivors: range, attempt: AttemptInMemory) -> Unmasked:
        """The sum of these silos' vectors; raises StateError when it is not the mean of their deltas."""
        self._spools.vectors = {self.names[silo]: self._vectors[silo] for silo in survivors}
        digests = {name: vector.manifest.digest for name, vector in self._spools.vectors.items()}
        unmask = attempt.unmask({name: bytes.fromhex(digest) for name, digest in digests.items()})
        try:
            _, mean = measured(lambda: self._mean(unmask, survivors))
            result, aggregate = measured(lambda: self._aggregator.masks.unmasked(_KEY, self.base, unmask, digests))
        finally:
            unmask.masks.erase()
        error = self._error(result.model, survivors)
        if not error < WORST_ERROR or result.saturated:
            raise _wrong_sum(
                survivors, f"relative L2 error {error:.3g}, {result.saturated} coordinates beyond their range"
            )
        self._models.retain({self.base})
        return Unmasked(mean=mean, aggregate=aggregate, relative_l2_error=error)

    def check(self, survivors: range, attempt: AttemptInMemory) -> tuple[ModelCheck, ModelCheck]:
        """Spot and joint, by the first silo, of the model that the sum of these silos' vectors makes."""
        self._spools.vectors = {self.names[silo]: self._vectors[silo] for silo in survivors}
        masked = sum_of(attempt, {name: vector.manifest.digest for name, vector in self._spools.vectors.items()})
        model = self._aggregator.aggregate_masked(_KEY, self.base, masked).model
        evidence = RoundEvidence(
            self._work / "shown", federation=FEDERATION, plan=PLAN, models=self._models, spools=self._spools
        )
        coordinator = Coordinator()
        evidence.make(_KEY, self.base, masked, model, coordinator.sign)
        shown = Shown(
            rule=StepRule(optimizer=optimizer_of(self._section), layout=self._layout, model_layout=self._layout),
            models=self._models,
            base=self.base,
            model=model,
            evidence=evidence,
            attempt=attempt,
            vectors=self._spools.vectors,
        )
        found = [checked_by(self.names[survivors[0]], shown, coordinator, mode) for mode in ("spot", "joint")]
        self._models.retain({self.base})
        return found[0], found[1]

    def _mean(self, unmask: Unmask, survivors: range) -> None:
        """The sum of the vectors with its masks taken off, as the aggregator reads it."""
        vectors = MaskedVectors(
            fixed_point=unmask.fixed_point, masks=unmask.masks, spools=list(self._spools.vectors.items())
        )
        out: FloatBlock = np.zeros(SLAB_BYTES["cpu"] // 4, dtype="<f4")
        weight_sum = vectors.tail().weight_sum
        if not weight_sum > 0.0:
            raise _wrong_sum(survivors, "no weight")
        with closing(MeanReader(vectors, weight_sum=weight_sum, slab_elements=len(out))) as mean:
            for first in range(0, self._deltas.elements, len(out)):
                mean.read_into(out[: self._deltas.elements - first].data.cast("B"))

    def _error(self, model: Digest, silos: range) -> float:
        """Relative L2 error of a model that began as zeros, beside the mean of these silos' deltas."""
        mean = self._deltas.mean(silos)
        found: FloatBlock = np.zeros(BLOCK, dtype="<f4")
        wanted: WideBlock = np.zeros(BLOCK)
        off = norm = 0.0
        with closing(VectorReader(self._models.vector(model))) as reader:
            for first, last in blocks(self._deltas.elements):
                size = last - first
                reader.read_into(found[:size].data.cast("B"))
                mean(wanted[:size], first)
                norm += float(np.einsum("i,i->", wanted[:size], wanted[:size]))
                wanted[:size] -= found[:size]
                off += float(np.einsum("i,i->", wanted[:size], wanted[:size]))
        return math.sqrt(off / norm)


class _Spools(Spools):
    """`vectors` has that of each silo; several may be one file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.vectors: Mapping[SiloName, StoredVector] = {}

    def committed(self, key: RoundKey, silo: SiloName, update: Digest, norm: float | None = None) -> StoredVector:
        return self.vectors[silo]


def _wrong_sum(survivors: range, what: str) -> StateError:
    return StateError(f"the sum of {len(survivors)} masked vectors is not that of their deltas: {what}")


def _models(work: Path, layout: Layout) -> ModelStore:
    """With an initial model of zeros."""
    initial = work / "initial.safetensors"
    whole, rest = divmod(layout.total_bytes, len(_ZEROS))
    manifest = model_file.write(initial, layout, [_ZEROS] * whole + [_ZEROS[:rest]])
    return ModelStore(
        work / "models", layout=layout, model_layout=layout, initial=manifest.digest, initial_file=initial
    )
