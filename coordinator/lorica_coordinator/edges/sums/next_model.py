"""The next model, slab by slab: what a reducer makes of the deltas goes into a step of the server optimizer.

A slab is the same part of the base model, of each optimizer slot and of every delta. The deltas of one slab are read
and added one after the other, so memory is a handful of slabs whatever the number of silos. Reading, arithmetic and
writing each have a thread, and pass slabs on in that order (slab_buffers.py). Every byte is checked against its digest
as it is read. What rests in the round (silo_wire/plans/adapters.py) comes out as it went in, whatever the deltas say.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.edges.models.model_store import MASTER, ModelStore, OptimizerState, Slab
from lorica_coordinator.vectors.slab_buffers import SlabBuffer, SlabBuffers, ahead
from lorica_coordinator.vectors.stored_vector import StoredVector, VectorReader
from lorica_security.errors import IntegrityError
from silo_wire.canonical import Digest
from silo_wire.plans.adapters import Turns
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.resting import at_rest
from silo_wire.server_step.rounding import round_to_bfloat16
from silo_wire.server_step.server_optimizer import ServerOptimizer, at_rate, slots


class Source(Protocol):
    """Bytes of a delta, in order."""

    def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes that come next, of which there must be as many."""

    def close(self) -> None: ...


SlabStep = Callable[[Tensor, Iterator[Tensor], ServerOptimizer, Mapping[str, Tensor], int, Scratch], None]
"""Turns a slab of the model into the next one and its optimizer state as well, in place, from that slab of each
delta: model, deltas, optimizer, state, number of the step, memory to compute in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deltas:
    """What a reducer has read for each slab, in that order, numbers of `dtype`, and what it makes of them.

    `most_elements` is the longest slab that it has memory for; None: it needs none that grows with the silos.
    """

    sources: Sequence[Callable[[], Source]]
    dtype: torch.dtype
    step: SlabStep
    most_elements: int | None = None


def of_mean(mean: Source) -> Deltas:
    """A single delta, in float32: the mean, which was made elsewhere."""
    return Deltas(sources=[lambda: mean], dtype=torch.float32, step=_apply_single)


def _apply_single(
    model: Tensor,
    slabs: Iterator[Tensor],
    optimizer: ServerOptimizer,
    state: Mapping[str, Tensor],
    step_number: int,
    scratch: Scratch,
) -> None:
    for mean in slabs:
        apply_mean(model, mean, optimizer, state, step_number=step_number, scratch=scratch.product)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that a round began from, in float32, its optimizer state, and what fills the state at first."""

    vector: StoredVector
    state: OptimizerState
    fills: Mapping[str, float]

    def __post_init__(self) -> None:
        if self.state.steps and set(self.state.slots) - {MASTER} != set(self.fills):
            raise IntegrityError(
                f"the optimizer state beside {self.vector.path} holds {sorted(self.state.slots)}, this plan's server "
                f"step needs {sorted(self.fills)}: restore it from a backup"
            )

    @property
    def elements(self) -> int:
        return self.vector.manifest.total_bytes // torch.float32.itemsize


class NextModel:
    """Makes the models of one plan, on `device`, and stores them in `models`.

    `carries` names the vectors that a reducer keeps from round to round, zero at first; they are slots of the state
    beside the optimizer's. `rates` multiply the optimizer's, round by round.
    """

    def __init__(
        self,
        *,
        models: ModelStore,
        optimizer: ServerOptimizer,
        device: torch.device,
        slab_elements: int,
        carries: Sequence[str] = (),
        turns: Turns,
        rates: ServerRates = UNCHANGED,
    ) -> None:
        self._models = models
        self._optimizer = optimizer
        self.device = device
        self._turns = turns
        self._rates = rates
        self.slab_elements = slab_elements
        self._fills = {**slots(optimizer), **dict.fromkeys(carries, 0.0)}

    def base(self, model: Digest) -> BaseModel:
        """Raises StorageError or IntegrityError naming the file that cannot be used."""
        state = self._models.state(model)
        return BaseModel(self._models.master(model, state), state, self._fills)

    def made(self, base: BaseModel, deltas: Deltas, *, round_number: int, silos: int) -> tuple[Digest, float]:
        """The model that this round makes of the updates of `silos` silos, stored with its optimizer state, and what
        the optimizer's rate was multiplied by. Raises what `deltas` and ModelStore.add raise; nothing is stored then.
        """
        rate = self._rates.of(round_number, silos)
        with closing(self._slabs(base, deltas, at_rate(self._optimizer, rate), round_number)) as slabs:
            names = (*base.fills, *((MASTER,) if self._models.keeps_master else ()))
            return self._models.add(slabs, slots=names, steps=base.state.steps + 1), rate

    def _longest(self, base: BaseModel, deltas: Deltas) -> int:
        """The elements of every slab but the last one."""
        return min(self.slab_elements, base.elements, deltas.most_elements or base.elements)

    def _slabs(
        self, base: BaseModel, deltas: Deltas, optimizer: ServerOptimizer, round_number: int
    ) -> Generator[Slab, None, None]:
        """The new model and its state; each slab is good until the next one is asked for."""
        of_one_slab = 1 + len(base.fills) + self._models.keeps_master
        # One slab is computed, one is written, one is read, and so is the next delta while another one is added.
        elements = self._longest(base, deltas)
        buffers = SlabBuffers(3 * of_one_slab + 2, elements * torch.float32.itemsize, self.device)
        reading = ahead(self._read(base, deltas, buffers), buffers.close)
        computing = self._computed(reading, base, deltas, optimizer, buffers, round_number)
        with closing(ahead(computing, buffers.close)) as computed:
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

    def _read(
        self, base: BaseModel, deltas: Deltas, buffers: SlabBuffers
    ) -> Generator["_Slab | SlabBuffer", None, None]:
        """For each slab what will be changed, then each delta in order."""
        with ExitStack() as stack:

            def filled(source: Source, elements: int, dtype: torch.dtype) -> SlabBuffer:
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

            master = open_(base.vector)
            of_state = {name: open_(base.state.slots[name]) for name in base.fills if base.state.steps}
            sources = [stack.enter_context(closing(open_source())) for open_source in deltas.sources]
            longest = self._longest(base, deltas)
            for start in range(0, base.elements, longest):
                elements = min(longest, base.elements - start)
                yield _Slab(
                    elements,
                    master=filled(master, elements, torch.float32),
                    state={
                        name: filled(of_state[name], elements, torch.float32)
                        if base.state.steps
                        else constant(elements, fill)
                        for name, fill in base.fills.items()
                    },
                    published=buffers.take() if self._models.keeps_master else None,
                )
                for source in sources:
                    yield filled(source, elements, deltas.dtype)

    def _computed(
        self,
        read: Generator["_Slab | SlabBuffer", None, None],
        base: BaseModel,
        deltas: Deltas,
        optimizer: ServerOptimizer,
        buffers: SlabBuffers,
        round_number: int,
    ) -> Generator["_Slab", None, None]:
        begin = 0
        scratch = Scratch.of(self._longest(base, deltas), self.device)
        with closing(read):
            for slab in read:
                assert isinstance(slab, _Slab)
                model = slab.master.values(slab.elements, torch.float32)
                state = {name: buffer.values(slab.elements, torch.float32) for name, buffer in slab.state.items()}
                values = self._values(read, slab.elements, deltas, buffers)
                memory, number = scratch.first(slab.elements), base.state.steps + 1
                with at_rest((model, *state.values()), self._turns.resting(round_number, begin, slab.elements)):
                    deltas.step(model, values, optimizer, state, number, memory)
                begin += slab.elements
                if slab.published is not None:
                    round_to_bfloat16(model, slab.published.values(slab.elements, torch.bfloat16))
                for buffer in slab.buffers:
                    buffer.mark()
                yield slab

    def _values(
        self, read: Iterator["_Slab | SlabBuffer"], elements: int, deltas: Deltas, buffers: SlabBuffers
    ) -> Iterator[Tensor]:
        """The deltas of one slab; each is given back when the next one is asked for."""
        for _ in deltas.sources:
            buffer = next(read)
            assert isinstance(buffer, SlabBuffer)
            yield buffer.values(elements, deltas.dtype)
            buffer.mark()
            buffers.give(buffer)


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
