"""Committed updates into the next model: coordinator/aggregation over files, slab by slab.

A slab is the same part of the base model, of each optimizer slot and of every delta. The deltas of one slab are read
and added one silo after the other, in order of name, so memory is a handful of slabs whatever the number of silos.
Reading, arithmetic and writing each have a thread, and pass slabs on in that order (slab_buffers.py).
Masked vectors come as the slabs of one delta, their mean, which masked_sum.py makes with threads of its own; so do deltas under
silo-level privacy (noised_mean.py).
Every byte is checked against its digest as it is read. Nothing here depends on the clock, on arrival order or on how far
an earlier try came: the same base model and committed updates give the same model on the same device.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from coordinator.aggregation.noised_sum import NoisedSum
from coordinator.aggregation.round_arithmetic import aggregate_slab
from coordinator.aggregation.streaming_sum import Scratch
from coordinator.aggregation.weighting import CohortWeights, SiloSummary, WeightCaps, weigh
from coordinator.edges.models.model_store import MASTER, ModelStore, OptimizerState, Slab
from coordinator.edges.models.spool import Spools
from coordinator.edges.sums.masked_sum import MaskedVectors, MeanReader, SpoolReader
from coordinator.edges.sums.noised_mean import NoisedMeanReader
from coordinator.edges.sums.release_ledger import ReleaseLedger, release_statement
from coordinator.rounds.secure_attempt import MaskedSum
from coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome, SiloWeight
from coordinator.service.ports import UnusableUpdate
from coordinator.vectors.slab_buffers import SlabBuffer, SlabBuffers, ahead
from coordinator.vectors.stored_vector import StoredVector, VectorReader
from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StateError
from lorica_security.identifiers import SiloName
from lorica_security.noise.noise_streams import NoiseStream
from lorica_security.secure_aggregation.coordinator_machine import Unmask
from silo_wire.canonical import Digest
from silo_wire.manifest import ParameterDtype, masked_layout
from silo_wire.messages import RoundKey
from silo_wire.plans.plan import AggregationSection
from silo_wire.plans.plan_optimizer import optimizer_of
from silo_wire.plans.privacy import PrivacySection
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.rounding import round_to_bfloat16
from silo_wire.server_step.server_optimizer import slots

DeviceSetting = Literal["auto", "cpu", "cuda"]
SLAB_BYTES: dict[str, int] = {"cpu": 1 << 20, "cuda": 32 << 20}
"""By kind of device: what stays in a core's cache, and what a copy to a GPU and back is worth its overhead for."""
_TYPES: dict[ParameterDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_for(setting: DeviceSetting) -> torch.device:
    """`auto` is a GPU where there is one; raises ConfigurationError for `cuda` where there is none."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device = 'cuda' and no CUDA device is usable here: set device to 'auto' or 'cpu'")
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


class Aggregator:
    """Updates of one plan into its next model, stored in `models`.

    `update_dtype` is the type of the committed deltas, `slab_bytes` the size of a slab in float32, a multiple of 4. Under a
    `privacy` of level "silo" sums are noised, and what is released of deltas in the clear is entered into `releases`.
    """

    def __init__(
        self,
        section: AggregationSection,
        *,
        models: ModelStore,
        spools: Spools,
        update_dtype: ParameterDtype,
        device: torch.device,
        slab_bytes: int | None = None,
        privacy: PrivacySection | None = None,
        releases: ReleaseLedger | None = None,
    ) -> None:
        slab_bytes = SLAB_BYTES[device.type] if slab_bytes is None else slab_bytes
        if slab_bytes < 4 or slab_bytes % 4:
            raise ValueError(f"slab_bytes={slab_bytes}: use a multiple of 4, at least 4")
        self._update_dtype = _TYPES[update_dtype]
        self._section = section
        self._privacy = privacy if privacy is not None and privacy.level == "silo" else None
        self._releases = releases
        self._caps = WeightCaps(
            max_weight=section.max_weight or None,
            max_weight_share=section.max_weight_share or None,
            max_delta_norm=section.max_delta_norm or None,
        )
        self._optimizer = optimizer_of(section)
        self._models = models
        self._spools = spools
        self._device = device
        self._slab_elements = slab_bytes // torch.float32.itemsize

    def aggregate(self, key: RoundKey, base_model: Digest, updates: Sequence[CommittedUpdate]) -> AggregationResult:
        """Weigh `updates`, sum them, step the server optimizer, store the new model with its optimizer state.

        Raises UnusableUpdate naming the silo whose spool was damaged, whose summary is absurd, or whose delta takes the
        model out of float32's range; StorageError or IntegrityError naming the file of ours that cannot be used. Under silo-level
        privacy see `_aggregate_privately`.
        """
        if self._privacy is not None:
            return self._aggregate_privately(key, base_model, updates, self._privacy)
        cohort = weigh([_summary(update) for update in updates], weighting=self._section.weighs, caps=self._caps)
        return self.apply(key, base_model, cohort, updates)

    def apply(
        self, key: RoundKey, base_model: Digest, cohort: CohortWeights, updates: Sequence[CommittedUpdate]
    ) -> AggregationResult:
        """`aggregate` with the weights given. A sum of weights that is not above zero changes nothing: ZERO_WEIGHT."""
        if not cohort.total > 0.0:
            return _result(base_model, Outcome.ZERO_WEIGHT, cohort)
        by_name = sorted(updates, key=lambda update: update.silo)
        spools = [(update.silo, self._committed(key, update.silo, update.digest)) for update in by_name]
        work = self._work(base_model, [partial(SpoolReader, *spool) for spool in spools], self._update_dtype, cohort)
        try:
            model = self._next_model(work)
        except (MalformedMessage, ConfigurationError) as error:
            # Finite deltas whose mean or step is not: the longest of them is to blame, and the others can go on.
            longest = max(by_name, key=lambda update: update.delta_norm)
            raise UnusableUpdate(
                longest.silo, f"the delta of silo {longest.silo} has norm {longest.delta_norm:.3g}: {error}"
            ) from error
        return _result(model, Outcome.APPLIED, cohort)

    def _aggregate_privately(
        self, key: RoundKey, base_model: Digest, updates: Sequence[CommittedUpdate], privacy: PrivacySection
    ) -> AggregationResult:
        """The noised sum of clipped deltas, over a constant: entered into the ledger of releases, then a step of the server optimizer.

        Of single silos the result tells nothing. Raises what `aggregate` raises; BudgetSpent, before anything is made, where this
        release would cost more than the plan promises; ConfigurationError where the step takes the model out of float32's
        range, which is the plan's fault, since every delta is clipped.
        """
        if self._releases is None:
            raise StateError("deltas are to be noised here, and no ledger of releases was given: nothing is released")
        work = self._work(base_model, [], torch.float32, None)
        arithmetic = NoisedSum(
            clipping_norm=self._section.max_delta_norm,
            weight_cap=self._section.weight_cap,
            noise_multiplier=privacy.noise_multiplier,
            divisor=privacy.nominal_silos,
            parameters=work.elements,
        )
        by_name = sorted(updates, key=lambda update: update.silo)
        factors = []
        for update in by_name:
            summary = _summary(update)
            weight = self._section.weighs.raw_weight(summary)
            factors.append(arithmetic.factor(weight=weight, delta_norm=summary.delta_norm))
        spools = [(update.silo, self._committed(key, update.silo, update.digest)) for update in by_name]
        statement = release_statement(
            key,
            base_model,
            ((update.silo, update.digest, factor) for update, factor in zip(by_name, factors, strict=True)),
        )
        noise = NoiseStream(self._releases.noise_key(statement))
        more = self._releases.enter(key, statement, privacy)
        with closing(NoisedMeanReader(spools, factors, arithmetic=arithmetic, noise=noise)) as mean:
            model = self._next_model(replace(work, deltas=[lambda: mean]))
        return AggregationResult(model=model, outcome=Outcome.APPLIED, weights=(), last=not more)

    def aggregate_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        """Unmask the sum of the survivors' vectors, divide it by the sum of weights in it, go on as `aggregate` does.

        A sum of weights that is not above zero changes nothing: ZERO_WEIGHT. Under silo-level privacy, where silos have made the
        noise, a public constant takes the place of the sum of weights. Raises UnusableUpdate naming the silo whose spool was
        damaged; ConfigurationError where the mean takes the model out of float32's range, which is nobody's fault that could be
        seen; StorageError or IntegrityError naming the file of ours that cannot be used.
        """
        unmask = masked.attempt.unmask()
        try:
            return self.apply_masked(key, base_model, unmask, {it.silo: it.digest for it in masked.vectors})
        finally:
            unmask.masks.erase()

    def apply_masked(
        self, key: RoundKey, base_model: Digest, unmask: Unmask, digests: Mapping[SiloName, Digest]
    ) -> AggregationResult:
        """`aggregate_masked` with the masks given, and the manifest digest of each survivor's vector. Masks stay as they are."""
        vectors = self._vectors(key, unmask, digests)
        work = self._work(base_model, [], torch.float32, None)
        if (elements := unmask.fixed_point.ranges.elements) != work.elements:
            raise StateError(f"the masked vectors are of {elements} parameters, model {base_model} has {work.elements}")
        tail = vectors.tail()
        told = AggregationResult(
            model=base_model,
            outcome=Outcome.ZERO_WEIGHT,
            weights=(),
            weight_sum=tail.weight_sum,
            saturated=tail.saturated,
            coordinates=elements * len(unmask.survivors),
            scores=tail.scores,
        )
        if not tail.weight_sum > 0.0:
            return told
        weight_sum = tail.weight_sum
        if self._privacy is not None:  # weights are shares of the cap, and the sum of them is nobody's to know
            weight_sum = unmask.fixed_point.ranges.weight_cap * self._privacy.nominal_silos
        with closing(
            MeanReader(vectors, weight_sum=weight_sum, slab_elements=min(self._slab_elements, elements))
        ) as mean:
            model = self._next_model(replace(work, deltas=[lambda: mean]))
        return replace(told, model=model, outcome=Outcome.APPLIED)

    def score_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        """The scores in the sum of a closing round, in which nobody trained; the model stays. Raises as `aggregate_masked`."""
        unmask = masked.attempt.unmask()
        try:
            tail = self._vectors(key, unmask, {it.silo: it.digest for it in masked.vectors}).tail()
        finally:
            unmask.masks.erase()
        return AggregationResult(model=base_model, outcome=Outcome.SCORED, weights=(), scores=tail.scores)

    def _vectors(self, key: RoundKey, unmask: Unmask, digests: Mapping[SiloName, Digest]) -> MaskedVectors:
        if set(digests) != set(unmask.survivors):
            raise StateError(
                f"vectors of {', '.join(sorted(digests))} came for a sum of {', '.join(unmask.survivors)}: no mask fits"
            )
        return MaskedVectors(
            fixed_point=unmask.fixed_point,
            masks=unmask.masks,
            spools=[(silo, self._masked(key, silo, digests[silo], unmask)) for silo in unmask.survivors],
        )

    def _work(
        self,
        base_model: Digest,
        deltas: Sequence[Callable[[], "_Source"]],
        dtype: torch.dtype,
        cohort: CohortWeights | None,
    ) -> "_Work":
        state = self._models.state(base_model)
        return _Work(self._models.master(base_model, state), state, deltas, dtype, cohort, slots(self._optimizer))

    def _next_model(self, work: "_Work") -> Digest:
        with closing(self._slabs(work)) as slabs:
            names = (*work.fills, *((MASTER,) if self._models.keeps_master else ()))
            return self._models.add(slabs, slots=names, steps=work.state.steps + 1)

    def _committed(self, key: RoundKey, silo: SiloName, digest: Digest) -> StoredVector:
        try:
            return self._spools.committed(key, silo, digest)
        except IntegrityError as error:
            raise UnusableUpdate(silo, str(error)) from error

    def _masked(self, key: RoundKey, silo: SiloName, digest: Digest, unmask: Unmask) -> StoredVector:
        vector = self._committed(key, silo, digest)
        try:
            vector.manifest.check_layout(masked_layout(unmask.fixed_point.words))
        except MalformedMessage as error:
            raise UnusableUpdate(silo, f"the masked vector of silo {silo}: {error}") from error
        return vector

    def _slabs(self, work: "_Work") -> Generator[Slab, None, None]:
        """The new model and its state; each slab is good until the next one is asked for."""
        of_one_slab = 1 + len(work.fills) + self._models.keeps_master
        # One slab is computed, one is written, one is read, and so is the next delta while another one is added.
        elements = min(self._slab_elements, work.elements)
        buffers = SlabBuffers(3 * of_one_slab + 2, elements * torch.float32.itemsize, self._device)
        reading = ahead(self._read(work, buffers), buffers.close)
        with closing(ahead(self._computed(reading, work, buffers), buffers.close)) as computed:
            for done in computed:
                for buffer in done.buffers:
                    buffer.fetch()
                in_float32 = {name: buffer.content(done.elements, torch.float32) for name, buffer in done.state.items()}
                master = done.master.content(done.elements, torch.float32)
                if done.published is None:
                    yield Slab(master, in_float32)
                else:
                    published = done.published.content(done.elements, torch.bfloat16)
                    yield Slab(published, {MASTER: master, **in_float32})
                buffers.give(*done.buffers)

    def _read(self, work: "_Work", buffers: SlabBuffers) -> Generator["_Slab | SlabBuffer", None, None]:
        """For each slab what will be changed, then the delta of each silo in order of name."""
        with ExitStack() as stack:

            def filled(source: _Source, elements: int, dtype: torch.dtype) -> SlabBuffer:
                buffer = buffers.take()
                source.read_into(buffer.content(elements, dtype))
                buffer.send()
                return buffer

            def constant(elements: int, value: float) -> SlabBuffer:
                buffer = buffers.take()
                buffer.values(elements, torch.float32).fill_(value)
                buffer.mark()
                return buffer

            def open_(vector: StoredVector) -> VectorReader:
                return stack.enter_context(closing(VectorReader(vector)))

            base = open_(work.base)
            of_state = {name: open_(work.state.slots[name]) for name in work.fills if work.state.steps}
            deltas = [stack.enter_context(closing(open_delta())) for open_delta in work.deltas]
            for start in range(0, work.elements, self._slab_elements):
                elements = min(self._slab_elements, work.elements - start)
                yield _Slab(
                    elements,
                    master=filled(base, elements, torch.float32),
                    state={
                        name: filled(of_state[name], elements, torch.float32)
                        if work.state.steps
                        else constant(elements, fill)
                        for name, fill in work.fills.items()
                    },
                    published=buffers.take() if self._models.keeps_master else None,
                )
                for delta in deltas:
                    yield filled(delta, elements, work.dtype)

    def _computed(
        self,
        read: Generator["_Slab | SlabBuffer", None, None],
        work: "_Work",
        buffers: SlabBuffers,
    ) -> Generator["_Slab", None, None]:
        scratch = Scratch.of(min(self._slab_elements, work.elements), self._device)
        with closing(read):
            for slab in read:
                assert isinstance(slab, _Slab)
                model = slab.master.values(slab.elements, torch.float32)
                state = {name: buffer.values(slab.elements, torch.float32) for name, buffer in slab.state.items()}
                deltas = self._deltas(read, slab.elements, work, buffers)
                memory, number = scratch.first(slab.elements), work.state.steps + 1
                if work.cohort is None:
                    for mean in deltas:
                        apply_mean(model, mean, self._optimizer, state, step_number=number, scratch=memory.product)
                else:
                    named = zip((silo.silo for silo in work.cohort.silos), deltas, strict=True)
                    aggregate_slab(
                        model, named, work.cohort, self._optimizer, state, step_number=number, scratch=memory
                    )
                if slab.published is not None:
                    round_to_bfloat16(model, slab.published.values(slab.elements, torch.bfloat16))
                for buffer in slab.buffers:
                    buffer.mark()
                yield slab

    def _deltas(
        self, read: Iterator["_Slab | SlabBuffer"], elements: int, work: "_Work", buffers: SlabBuffers
    ) -> Iterator[Tensor]:
        """The deltas of one slab; each is given back when the next one is asked for."""
        for _ in work.deltas:
            buffer = next(read)
            assert isinstance(buffer, SlabBuffer)
            yield buffer.values(elements, work.dtype)
            buffer.mark()
            buffers.give(buffer)


class _Source(Protocol):
    """Bytes of a delta, in order."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes that come next, of which there must be as many."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Work:
    """What one aggregation reads: the model in float32, its state, deltas of `dtype`; and what fills the state at first.

    There is a delta for each silo of `cohort`, in its order; without a cohort a single one, the mean.
    """

    base: StoredVector
    state: OptimizerState
    deltas: Sequence[Callable[[], _Source]]
    dtype: torch.dtype
    cohort: CohortWeights | None
    fills: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.state.steps and set(self.state.slots) - {MASTER} != set(self.fills):
            raise IntegrityError(
                f"the optimizer state beside {self.base.path} holds {sorted(self.state.slots)}, this plan's server "
                f"optimizer needs {sorted(self.fills)}: restore it from a backup"
            )

    @property
    def elements(self) -> int:
        return self.base.manifest.total_bytes // torch.float32.itemsize


@dataclass(frozen=True, slots=True)
class _Slab:
    """The part of a model that is being changed: in float32, its optimizer state, and as it is published."""

    elements: int
    master: SlabBuffer
    state: Mapping[str, SlabBuffer]
    published: SlabBuffer | None

    @property
    def buffers(self) -> tuple[SlabBuffer, ...]:
        return self.master, *self.state.values(), *(() if self.published is None else (self.published,))


def _summary(update: CommittedUpdate) -> SiloSummary:
    try:
        return SiloSummary(
            silo=update.silo,
            examples=update.examples,
            loss_reduction=update.loss_reduction,
            optimizer_steps=update.summary.optimizer_steps,
            delta_norm=update.delta_norm,
        )
    except MalformedMessage as error:
        raise UnusableUpdate(update.silo, str(error)) from error


def _result(model: Digest, outcome: Outcome, cohort: CohortWeights) -> AggregationResult:
    return AggregationResult(
        model=model,
        outcome=outcome,
        weights=tuple(
            SiloWeight(silo=one.silo, weight=one.weight, share=one.share, capped=bool(one.caps)) for one in cohort.silos
        ),
        fallback=cohort.fallback,
    )
