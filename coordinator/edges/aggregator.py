"""Committed updates into the next model: coordinator/aggregation over files, slab by slab.

A slab is the same few MiB of the base model, of each optimizer slot and of every delta. The deltas of one slab are read
and added one silo after the other, in order of name, so memory is a handful of slabs whatever the number of silos.
Every byte is checked against its digest as it is read. Nothing here depends on the clock, on arrival order or on how far
an earlier try came: the same base model and committed updates give the same model on the same device.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Literal

import torch
from torch import Tensor

from coordinator.aggregation.round_arithmetic import aggregate_slab
from coordinator.aggregation.rounding import round_to_bfloat16
from coordinator.aggregation.server_optimizer import optimizer_named, slots
from coordinator.aggregation.weighting import CohortWeights, SiloSummary, WeightCaps, Weighting, weigh
from coordinator.edges.model_store import MASTER, ModelStore, OptimizerState, Slab
from coordinator.edges.spool import Spools
from coordinator.edges.stored_vector import StoredVector, VectorReader
from coordinator.rounds.updates import AggregationResult, CommittedUpdate, Outcome, SiloWeight
from coordinator.service.ports import UnusableUpdate
from security.errors import ConfigurationError, IntegrityError, MalformedMessage, StorageError
from security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.manifest import Dtype
from silo_wire.messages import RoundKey
from silo_wire.plan import AggregationSection

DeviceSetting = Literal["auto", "cpu", "cuda"]
SLAB_BYTES = 1 << 20
_TYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_for(setting: DeviceSetting) -> torch.device:
    """`auto` is a GPU where there is one; raises ConfigurationError for `cuda` where there is none."""
    if setting == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device = 'cuda' and no CUDA device is usable here: set device to 'auto' or 'cpu'")
    return torch.device("cuda" if setting != "cpu" and torch.cuda.is_available() else "cpu")


class Aggregator:
    """Updates of one plan into its next model, stored in `models`.

    `update_dtype` is the type of the committed deltas, `slab_bytes` the size of a slab in float32, a multiple of 4.
    """

    def __init__(
        self,
        section: AggregationSection,
        *,
        models: ModelStore,
        spools: Spools,
        update_dtype: Dtype,
        device: torch.device,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        if slab_bytes < 4 or slab_bytes % 4:
            raise ValueError(f"slab_bytes={slab_bytes}: use a multiple of 4, at least 4")
        self._update_dtype = _TYPES[update_dtype]
        self._weighting = Weighting(section.weighting)
        self._caps = WeightCaps(
            max_weight=section.max_weight or None,
            max_weight_share=section.max_weight_share or None,
            max_delta_norm=section.max_delta_norm or None,
        )
        self._optimizer = optimizer_named(
            section.server_optimizer,
            learning_rate=section.server_learning_rate,
            momentum=section.momentum,
            beta1=section.beta1,
            beta2=section.beta2,
            tau=section.tau,
        )
        self._models = models
        self._spools = spools
        self._device = device
        self._slab_bytes = slab_bytes

    def aggregate(self, key: RoundKey, base_model: Digest, updates: Sequence[CommittedUpdate]) -> AggregationResult:
        """Weigh `updates`, sum them, step the server optimizer, store the new model with its optimizer state.

        Raises UnusableUpdate naming the silo whose spool was damaged, whose summary is absurd, or whose delta takes the
        model out of float32's range; StorageError or IntegrityError naming the file of ours that cannot be used.
        """
        cohort = weigh([_summary(update) for update in updates], weighting=self._weighting, caps=self._caps)
        return self.apply(key, base_model, cohort, updates)

    def apply(
        self, key: RoundKey, base_model: Digest, cohort: CohortWeights, updates: Sequence[CommittedUpdate]
    ) -> AggregationResult:
        """`aggregate` with the weights given. A sum of weights that is not above zero changes nothing: ZERO_WEIGHT."""
        if not cohort.total > 0.0:
            return _result(base_model, Outcome.ZERO_WEIGHT, cohort)
        by_name = sorted(updates, key=lambda update: update.silo)
        deltas = [(update.silo, self._committed(key, update)) for update in by_name]
        state = self._models.state(base_model)
        try:
            model = self._models.add(
                self._slabs(self._models.master(base_model, state), state, deltas, cohort),
                slots=(*slots(self._optimizer), *((MASTER,) if self._models.keeps_master else ())),
                steps=state.steps + 1,
            )
        except (MalformedMessage, ConfigurationError) as error:
            # Finite deltas whose mean or step is not: the longest of them is to blame, and the others can go on.
            longest = max(by_name, key=lambda update: update.delta_norm)
            raise UnusableUpdate(
                longest.silo, f"the delta of silo {longest.silo} has norm {longest.delta_norm:.3g}: {error}"
            ) from error
        return _result(model, Outcome.APPLIED, cohort)

    def _committed(self, key: RoundKey, update: CommittedUpdate) -> StoredVector:
        try:
            return self._spools.committed(key, update.silo, update.digest)
        except IntegrityError as error:
            raise UnusableUpdate(update.silo, str(error)) from error

    def _slabs(
        self,
        base: StoredVector,
        state: OptimizerState,
        deltas: Sequence[tuple[SiloName, StoredVector]],
        cohort: CohortWeights,
    ) -> Iterator[Slab]:
        """Each slab is good until the next one is asked for."""
        fills = slots(self._optimizer)
        if state.steps and set(state.slots) - {MASTER} != set(fills):
            raise IntegrityError(
                f"the optimizer state beside {base.path} holds {sorted(state.slots)}, this plan's server optimizer needs "
                f"{sorted(fills)}: restore it from a backup"
            )
        elements = base.manifest.total_bytes // 4
        with ExitStack() as stack:

            def reader(vector: StoredVector) -> VectorReader:
                return stack.enter_context(closing(VectorReader(vector)))

            of_base = reader(base)
            of_state = {name: reader(state.slots[name]) for name in fills if state.steps}
            of_silos = []
            for silo, vector in deltas:
                with _blamed_on(silo):
                    of_silos.append((silo, reader(vector)))
            for start in range(0, elements, self._slab_bytes // 4):
                length = min(self._slab_bytes // 4, elements - start)
                model = _read(of_base, length, torch.float32)
                values = {
                    name: _read(of_state[name], length, torch.float32) if state.steps else torch.full_like(model, fill)
                    for name, fill in fills.items()
                }

                def slabs_of_silos(length: int = length) -> Iterator[tuple[SiloName, Tensor]]:
                    for silo, source in of_silos:
                        with _blamed_on(silo):
                            yield silo, _read(source, length, self._update_dtype)

                aggregate_slab(model, slabs_of_silos(), cohort, self._optimizer, values, step_number=state.steps + 1)
                if self._models.keeps_master:
                    published = torch.empty(length, dtype=torch.bfloat16)
                    round_to_bfloat16(model, published)
                    yield Slab(_bytes(published), {MASTER: _bytes(model), **{n: _bytes(v) for n, v in values.items()}})
                else:
                    yield Slab(_bytes(model), {name: _bytes(v) for name, v in values.items()})


@contextmanager
def _blamed_on(silo: SiloName) -> Iterator[None]:
    try:
        yield
    except (IntegrityError, StorageError) as error:
        raise UnusableUpdate(silo, f"the committed update of silo {silo} cannot be used: {error}") from error


def _read(source: VectorReader, elements: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(elements, dtype=dtype)
    source.read_into(_bytes(values))
    return values


def _bytes(values: Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


def _summary(update: CommittedUpdate) -> SiloSummary:
    try:
        return SiloSummary(
            silo=update.silo,
            examples=update.examples,
            loss_reduction=update.loss_reduction,
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
