"""A plan of a very small T5 on disk, flat vectors for it, and updates as silos would send them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.edges.sums.plan_parts import model_store
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_coordinator.vectors.stored_vector import StoredVector
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.manifest import Dtype, Layout, manifest_of
from silo_wire.messages import RoundKey, TrainingSummary, UpdateHeader
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from tests.support import int8_by_hand

FEDERATION = "health-net"
A, B, C = SiloName("bank-a"), SiloName("bank-b"), SiloName("clinic-c")
CHUNK_BYTES = 16 << 10

Vector = NDArray[np.float32]
TYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def travelling(delta: Vector, dtype: Dtype) -> bytes:
    """The delta as its silo sends it."""
    if dtype == "int8":
        return int8_by_hand.written(delta)
    return torch.from_numpy(delta).to(TYPES[dtype]).view(torch.uint8).numpy().tobytes()


def make_plan(state: Path, name: str = "first", **arguments: Any) -> PlanBundle:
    """A plan folder with a `micro` model from scratch below `state`."""
    from lorica_coordinator.plans.model_source import (
        SizedModel,
    )  # transformers takes seconds to import: only where it is needed
    from lorica_coordinator.plans.plan_folder import create_plan

    values: dict[str, Any] = {"federation": FEDERATION, "source": SizedModel("micro"), "seed": 7, **arguments}
    return create_plan(state / "plans", name=name, **values)


def random_vector(layout: Layout, seed: int, scale: float = 1e-3) -> Vector:
    drawn = torch.randn(layout.parameters, generator=torch.Generator().manual_seed(seed)) * scale
    return np.ascontiguousarray(drawn.numpy(), dtype="<f4")


def content_of(vector: StoredVector) -> bytes:
    """The whole vector, checked."""
    return b"".join(vector.chunk(index) for index in range(vector.manifest.chunks))


def stored_vector(models: ModelStore, model: Digest) -> Vector:
    """A model as it is published, in float32."""
    content = content_of(models.vector(model))
    published = torch.frombuffer(bytearray(content), dtype=TYPES[models.model_layout.dtype])
    return np.ascontiguousarray(published.float().numpy(), dtype="<f4")


def round_key(plan: Digest, round_number: int = 1, attempt: int = 1) -> RoundKey:
    return RoundKey(federation=FEDERATION, plan=plan, round=round_number, attempt=attempt)


def summary(examples: int = 10, reduction: float = 1.0) -> TrainingSummary:
    return TrainingSummary(
        examples=examples,
        loss_max=reduction,
        loss_min=0.0,
        loss_first=reduction,
        loss_last=0.0,
        optimizer_steps=1,
        seconds=1.0,
    )


def update_header(
    key: RoundKey,
    base: Digest,
    layout: Layout,
    delta: bytes,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    told: TrainingSummary | None = None,
) -> UpdateHeader:
    return UpdateHeader(
        key=key,
        model=base,
        manifest=manifest_of(layout, [delta], chunk_bytes),
        summary=told or summary(),
        signature=b"s" * 64,
    )


def chunk_of(header: UpdateHeader, delta: bytes, index: int) -> bytes:
    begin = index * header.manifest.chunk_bytes
    return delta[begin : begin + header.manifest.chunk_size(index)]


@dataclass(frozen=True)
class Workplace:
    """One plan's models and spools below `state`."""

    state: Path
    bundle: PlanBundle
    models: ModelStore
    spools: Spools

    @classmethod
    def at(cls, state: Path, bundle: PlanBundle) -> "Workplace":
        return cls(state, bundle, model_store(state, bundle), Spools(state / "spools"))

    @property
    def layout(self) -> Layout:
        return self.bundle.layout

    def key(self, round_number: int = 1, attempt: int = 1) -> RoundKey:
        return round_key(self.bundle.plan.digest, round_number, attempt)

    def send(
        self,
        key: RoundKey,
        silo: SiloName,
        delta: Vector,
        *,
        examples: int = 10,
        reduction: float = 1.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> CommittedUpdate:
        """Spool and commit a whole update, in the plan's type for updates."""
        layout = self.bundle.update_layout
        data, chunk_bytes = travelling(delta, layout.dtype), chunk_bytes - chunk_bytes % layout.unit_bytes
        told = summary(examples, reduction)
        header = update_header(
            key, Digest(self.bundle.plan.model.initial), layout, data, chunk_bytes=chunk_bytes, told=told
        )
        spool = self.spools.open(key, silo, header, layout)
        for index in range(spool.held, header.manifest.chunks):
            spool.write(index, chunk_of(header, data, index))
        norm = spool.commit()
        return CommittedUpdate(silo=silo, digest=header.manifest.digest, summary=told, delta_norm=norm)

    def aggregator(
        self, changes: Mapping[str, Any] | None = None, slab_bytes: int = CHUNK_BYTES, rates: ServerRates = UNCHANGED
    ) -> Aggregator:
        return Aggregator(
            AggregationSection.model_validate(dict(changes or {})),
            models=self.models,
            spools=self.spools,
            update_dtype=self.bundle.plan.wire.update,
            device=torch.device("cpu"),
            slab_bytes=slab_bytes,
            turns=self.bundle.turns,
            reprojected=self.bundle.reprojected,
            rates=rates,
        )
