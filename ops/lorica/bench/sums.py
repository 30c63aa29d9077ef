"""`lorica bench-sums`: one aggregation of a round, on each device that there is: seconds, and whether bits differ.

Spools, digests, encryption at rest and the writing of the model are the coordinator's own; only the wire is missing.
Each device computes the same two rounds from the same committed updates: the first fills the optimizer's state, the
second, which is timed, reads it.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table

from lorica.bench.figures import write_figures
from lorica.bench.model import write_model
from lorica.bench.run import empty_folder
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.edges.sums.plan_parts import model_store
from lorica_coordinator.plans.model_source import FolderModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_coordinator.vectors.stored_vector import VectorReader
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout, manifest_of
from silo_wire.messages import RoundKey, TrainingSummary, UpdateHeader
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.aggregation import AggregationSection

OPTIMIZERS: Final = ("sgd", "adam")
FEDERATION: Final = "bench"
CHUNK_BYTES: Final = 1 << 20
_PIECE: Final = 1 << 22
"""Elements compared at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`devices` in the order in which they are timed; the first one is what the others are held against."""

    devices: Sequence[str]
    optimizers: Sequence[str]
    silos: int
    parameters: int
    repeats: int
    work: Path
    out: Path | None

    def __post_init__(self) -> None:
        for device in self.devices:
            if device not in ("cpu", "cuda"):
                raise ConfigurationError(f"device {device!r} is unknown: use cpu or cuda")
            if device == "cuda" and not torch.cuda.is_available():
                raise ConfigurationError("device 'cuda' is not usable here: leave it out, or run where a GPU is")
        if unknown := set(self.optimizers) - set(OPTIMIZERS):
            raise ConfigurationError(f"optimizer {min(unknown)!r} is unknown: use {', '.join(OPTIMIZERS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one optimizer on one device. `differing` parameters of the new model have other bits than on the first device;
    `largest` is the largest difference relative to the larger of the two numbers."""

    device: str
    optimizer: str
    silos: int
    parameters: int
    seconds: float
    cpu_s: float
    differing: int
    largest: float


def run_bench_sums(choice: Choice, console: Console) -> list[Figures]:
    """Measure each optimizer on each device; raises StorageError where the disk has no room."""
    size = choice.parameters * torch.float32.itemsize
    place = empty_folder(choice.work, "sums", needed=size * (choice.silos + 5 * len(choice.devices) + 3))
    found: list[Figures] = []
    try:
        with console.status(f"a model of {choice.parameters:,} parameters and {choice.silos} updates"):
            write_model(place / "t5", choice.parameters, seed=1)
            bundle = create_plan(
                place / "plans", name="sums", federation=FEDERATION, source=FolderModel(place / "t5"), seed=1
            )
            spools = Spools(place / "spools")
            updates = [_sent(bundle, spools, number) for number in range(choice.silos)]
        for optimizer in choice.optimizers:
            with console.status(optimizer):
                found += _of_optimizer(choice, place, bundle, spools, updates, optimizer)
            write_figures(choice.out, [asdict(one) for one in found])
    finally:
        shutil.rmtree(place, ignore_errors=True)
    show_table(console, _table(found))
    return found


def _of_optimizer(
    choice: Choice, place: Path, bundle: PlanBundle, spools: Spools, updates: Sequence[CommittedUpdate], optimizer: str
) -> list[Figures]:
    found: list[Figures] = []
    first: tuple[ModelStore, Digest] | None = None
    for device in choice.devices:
        state = place / f"{optimizer}-{device}"
        shutil.copytree(place / "plans", state / "plans")
        models = model_store(state, bundle)
        aggregator = Aggregator(
            AggregationSection.model_validate(
                {"server_optimizer": optimizer, **({"momentum": 0.9} if optimizer == "sgd" else {})}
            ),
            models=models,
            spools=spools,
            update_dtype=bundle.plan.wire.update,
            device=torch.device(device),
        )
        key = _key(bundle)
        middle = aggregator.aggregate(key, models.initial(), updates).model
        times: list[tuple[float, float]] = []
        for _ in range(choice.repeats):
            wall, cpu = time.perf_counter(), time.process_time()
            made = aggregator.aggregate(key, middle, updates).model
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
        first = first or (models, made)
        differing, largest = _difference(first, (models, made))
        wall, cpu = sorted(times)[len(times) // 2]
        found.append(
            Figures(
                device=device,
                optimizer=optimizer,
                silos=len(updates),
                parameters=bundle.layout.parameters,
                seconds=round(wall, 3),
                cpu_s=round(cpu, 3),
                differing=differing,
                largest=largest,
            )
        )
    return found


def _key(bundle: PlanBundle) -> RoundKey:
    return RoundKey(federation=FEDERATION, plan=bundle.plan.digest, round=1, attempt=1)


def _sent(bundle: PlanBundle, spools: Spools, number: int) -> CommittedUpdate:
    """A random delta as silo `number` would send it, spooled and committed."""
    silo, layout, key = SiloName(f"silo-{number}"), bundle.update_layout, _key(bundle)
    content = list(_chunks(layout, seed=number))
    told = TrainingSummary(
        examples=100 * (number + 1),
        loss_max=2.0,
        loss_min=1.0,
        loss_first=2.0,
        loss_last=1.0,
        optimizer_steps=1,
        seconds=1.0,
    )
    manifest = manifest_of(layout, content, CHUNK_BYTES)
    header = UpdateHeader(
        key=key, model=Digest(bundle.plan.model.initial), manifest=manifest, summary=told, signature=bytes(64)
    )
    spool = spools.open(key, silo, header, layout)
    for index, chunk in enumerate(content):
        spool.write(index, chunk)
    return CommittedUpdate(silo=silo, digest=manifest.digest, summary=told, delta_norm=spool.commit())


def _chunks(layout: Layout, *, seed: int) -> Iterator[bytes]:
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, layout.total_bytes, CHUNK_BYTES):
        elements = min(CHUNK_BYTES, layout.total_bytes - start) // torch.float32.itemsize
        yield (torch.randn(elements, generator=generator) * 1e-3).numpy().tobytes()


def _difference(one: tuple[ModelStore, Digest], other: tuple[ModelStore, Digest]) -> tuple[int, float]:
    """How many parameters of two models have other bits, and the largest relative difference."""
    differing, largest = 0, 0.0
    vectors = [models.vector(model) for models, model in (one, other)]
    left = vectors[0].manifest.total_bytes // torch.float32.itemsize
    with closing(VectorReader(vectors[0])) as first, closing(VectorReader(vectors[1])) as second:
        while left:
            count = min(left, _PIECE)
            a, b = (_read(reader, count) for reader in (first, second))
            differing += int((a.view(torch.int32) != b.view(torch.int32)).sum())
            larger = torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(torch.float32).tiny)
            largest = max(largest, float(((a - b).abs() / larger).max()))
            left -= count
    return differing, largest


def _read(reader: VectorReader, elements: int) -> torch.Tensor:
    content = bytearray(elements * torch.float32.itemsize)
    reader.read_into(memoryview(content))
    return torch.frombuffer(content, dtype=torch.float32)


def _table(found: Sequence[Figures]) -> Table:
    table = Table(title=f"{found[0].silos} silos, {found[0].parameters:,} parameters", title_style="dim")
    for column in ("optimizer", "device", "seconds", "CPU s", "parameters with other bits", "largest difference"):
        table.add_column(column, justify="left" if column in ("optimizer", "device") else "right")
    for one in found:
        table.add_row(
            one.optimizer,
            one.device,
            f"{one.seconds:.2f}",
            f"{one.cpu_s:.2f}",
            f"{one.differing / one.parameters:.2%}",
            f"{one.largest:.1e}",
        )
    return table
