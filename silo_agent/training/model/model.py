"""The T5 of a plan bundle and its parameters as one flat vector in canonical order.

Built from config.json alone: a model_type of T5's family, transformers' own class, no folder, no network, no code of
others. Parameters are allocated, not initialised: a round model must be loaded before use. The layout decides what is
tied:
transformers ties every T5's output layer to its embedding, also v1.1's, so a layout that lists both gets them apart
again. Under a plan with adapters the T5 is their base, loaded once and frozen; PEFT adds the adapters, and what is
trained of them is what is bound, loaded and sent. Where that is B alone, A is what the plan's seed makes, and frozen.
"""

import math
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, StorageError
from silo_agent.rounds.update import BLOCK_ELEMENTS, FloatBlock, squared_norm
from silo_agent.training.model.vector_file import VectorReader, blocks
from silo_agent.training.ranks.ranks import ALONE, Ranks
from silo_agent.training.ranks.sharded_ranks import ShardedRanks
from silo_wire.manifest import Layout, TensorSpec, manifest_of
from silo_wire.model_folders.t5_config import NO_CONFIGURATION, model_class, t5_config
from silo_wire.plans.adapters import AdaptersSection
from silo_wire.plans.model_files import CONFIG_FILE

OUTPUT_LAYER = "lm_head.weight"
ADAPTER = "default"
"""What PEFT calls the adapter that is added first, also in the middle of its parameters' names."""
T5 = Any
"""A T5ForConditionalGeneration, or the same of mT5 or umT5. Not typed as one: to the type checker a module's children
are `Tensor | Module`."""


@dataclass(frozen=True)
class BoundParameters:
    """A model's parameters in the order of a layout, each once; `specs` and `tensors` run side by side.

    A tensor is all of its parameter, or rows of it, which may be none: those of a rank that holds a part of the model.
    `begins` then says where each begins in the flat vector.
    """

    specs: tuple[TensorSpec, ...]
    tensors: tuple[nn.Parameter, ...]
    begins: tuple[int, ...] | None = None

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Where each parameter begins in the flat vector, and where the last one ends."""
        return tuple(accumulate((spec.elements for spec in self.specs), initial=0))

    @property
    def elements(self) -> int:
        """Of the flat vector, held or not."""
        return self._starts[-1]

    @cached_property
    def held(self) -> tuple[range, ...]:
        """The elements of the flat vector that are here, in order."""
        return (range(self.elements),) if self.begins is None else tuple(part for _, _, part in self.placed() if part)

    def placed(self) -> Iterator[tuple[TensorSpec, nn.Parameter, range]]:
        """With the elements of the flat vector that each tensor has."""
        begins = self._starts[:-1] if self.begins is None else self.begins
        for spec, tensor, begin in zip(self.specs, self.tensors, begins, strict=True):
            yield spec, tensor, range(begin, begin + tensor.numel())

    @cached_property
    def _not_empty(self) -> tuple[list[tuple[TensorSpec, nn.Parameter, range]], list[int]]:
        placed = [each for each in self.placed() if each[2]]
        return placed, [part.start for _, _, part in placed]

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    def slices(self, begin: int, end: int) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
        """The flat vector's elements from `begin` until `end`, which are held, as views of the tensors that hold them,
        in order."""
        placed, starts = self._not_empty
        index = bisect_right(starts, begin) - 1
        while begin < end:
            spec, tensor, part = placed[index]
            stop = min(part.stop, end)
            yield spec, tensor.detach().view(-1)[begin - part.start : stop - part.start]
            begin, index = stop, index + 1

    def beside(self, values: FloatBlock, begin: int) -> Iterator[tuple[TensorSpec, torch.Tensor, FloatBlock]]:
        """The same for as many elements as `values` has, each view with its part of `values`."""
        position = 0
        for spec, tensor in self.slices(begin, begin + len(values)):
            yield spec, tensor, values[position : position + len(tensor)]
            position += len(tensor)


def bound_file(path: Path, layout: Layout) -> BoundParameters:
    """The float32 vector of `layout` in `path`, to be read: a mapping of the file. Raises StorageError."""
    try:
        vector = torch.from_numpy(np.memmap(path, dtype="<f4", mode="c"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}): correct permissions or disk") from error
    tensors = (nn.Parameter(vector[at:][: spec.elements], requires_grad=False) for spec, at in layout.placed())
    return BoundParameters(layout.tensors, tuple(tensors))


def build_model(
    files: Mapping[str, bytes],
    layout: Layout,
    *,
    device: torch.device,
    dropout: float | None = None,
    ranks: Ranks = ALONE,
) -> T5:
    """A T5 of `layout` with uninitialised float32 parameters on `device`, of sharded `ranks` with the rows of this one.

    Raises MalformedMessage where config.json is not a plain T5 or does not make exactly the tensors of `layout`; that
    is found out before memory is taken.
    """
    config = t5_config(files[CONFIG_FILE], dropout)
    if not 1 <= config.num_layers + (config.num_decoder_layers or 0) <= len(layout.tensors):
        raise MalformedMessage(f"{CONFIG_FILE} has more layers than layout.json has tensors: they belong to two models")
    try:
        with torch.device("meta"):
            model = model_class(config)(config)
    except NO_CONFIGURATION as error:
        raise MalformedMessage(f"{CONFIG_FILE} makes no T5: {' '.join(str(error).split())}") from error
    if OUTPUT_LAYER in {tensor.name for tensor in layout.tensors} and model.lm_head.weight is model.shared.weight:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight, device="meta"))
    bind(model, layout)
    if isinstance(ranks, ShardedRanks):
        ranks.shard(model)
    else:
        _allocate(model, device)
    return model


def layout_of(model: T5) -> Layout:
    """The canonical layout: parameters sorted by name, a tied one once, under the first of its names."""
    seen: set[int] = set()
    tensors = []
    for name, parameter in sorted(model.named_parameters(remove_duplicate=False), key=lambda item: item[0]):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            tensors.append(TensorSpec(name, tuple(parameter.shape)))
    return Layout("float32", tuple(tensors))


def bind(model: T5, layout: Layout, ranks: Ranks = ALONE) -> BoundParameters:
    """The parameters that `layout` names, of sharded `ranks` the rows of this one; raises MalformedMessage unless it is
    exactly the model's own layout."""
    own = layout_of(model)
    if own.dtype != layout.dtype:
        raise MalformedMessage(f"plan's layout has dtype {layout.dtype}: only float32 is taken")
    if own != layout:
        raise MalformedMessage(f"plan's {CONFIG_FILE} and layout.json disagree: {_first_difference(own, layout)}")
    named = dict(model.named_parameters(remove_duplicate=False))
    tensors = tuple(named[tensor.name] for tensor in layout.tensors)
    if not isinstance(ranks, ShardedRanks):
        return BoundParameters(layout.tensors, tensors)
    begins = (
        start + ranks.own_rows(spec.shape[0]).start * (spec.elements // spec.shape[0])
        for spec, start in layout.placed()
    )
    return BoundParameters(layout.tensors, tuple(map(ranks.part, tensors)), tuple(begins))


def add_adapters(
    model: T5, section: AdaptersSection, layout: Layout, fixed: Layout | None = None
) -> tuple[BoundParameters, BoundParameters]:
    """Freeze `model` and have PEFT add the adapters of `section`: those that are trained, which `layout` names, and
    those that are not, which `fixed` names; uninitialised, on the model's device.

    Raises MalformedMessage unless they are exactly those of both layouts.
    """
    # Here, not above: it takes a second to load, which plans without adapters need not wait for.
    from peft import LoraConfig, inject_adapter_in_model

    wanted = LoraConfig(
        r=section.rank, lora_alpha=section.alpha, lora_dropout=0.0, bias="none", target_modules=list(section.layers)
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inject_adapter_in_model(wanted, model)
    added = {
        name.replace(f".{ADAPTER}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    own = Layout("float32", tuple(TensorSpec(name, tuple(added[name].shape)) for name in sorted(added)))
    stays = () if fixed is None else fixed.tensors
    both = Layout("float32", tuple(sorted((*layout.tensors, *stays), key=lambda tensor: tensor.name)))
    if own != both:
        raise MalformedMessage(f"plan's [adapters] and layout.json disagree: {_first_difference(own, both)}")
    for tensor in stays:
        added[tensor.name].requires_grad_(False)
    trained, frozen = (
        BoundParameters(tensors, tuple(added[tensor.name] for tensor in tensors)) for tensors in (layout.tensors, stays)
    )
    return trained, frozen


def load_fixed(parameters: BoundParameters, layout: Layout, vector: Iterable[memoryview], digest: str) -> None:
    """Fill what nobody trains from the blocks of `vector`, one a tensor of `layout`.

    Raises IntegrityError where that is not the vector of the manifest `digest`, by which all silos have the same.
    """
    made = [np.frombuffer(block, dtype="<f4") for block in vector]
    found = manifest_of(layout, (values.data.cast("B") for values in made)).digest
    if found != digest:
        raise IntegrityError(
            f"the plan's seed makes the fixed halves of its adapters {found} here, the plan names {digest}: the plan "
            "was made by another release of torch, or on a processor whose vector instructions differ; run this silo "
            'where the seed makes the same, or have the operator make a plan whose [adapters] train is "alternate"'
        )
    with torch.no_grad():
        for tensor, values in zip(parameters.tensors, made, strict=True):
            tensor.copy_(torch.from_numpy(values.copy()).view(tensor.shape))


def _first_difference(own: Layout, layout: Layout) -> str:
    mine, theirs = ({tensor.name: tensor.shape for tensor in each.tensors} for each in (own, layout))
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            return (
                f"tensor {name} is {mine.get(name, 'absent')} by the former, {theirs.get(name, 'absent')} by the latter"
            )
    return "the order of tensors"


def _allocate(model: T5, device: torch.device) -> None:
    """Real memory for each meta parameter, shared where it was shared (Module.to_empty would split tied ones)."""
    if next(model.buffers(), None) is not None:
        raise ConfigurationError("this T5 has buffers, which a flat vector does not carry: use transformers 5")
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device=device))
    # All at once at the end: an id may be reused as soon as the last name of a meta parameter is gone.
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, made.get(id(parameter), parameter))


def load_vector(parameters: BoundParameters, vector: VectorReader) -> None:
    """Read a whole vector, or what is held of it, into the parameters' own memory, on a GPU block by block through the
    host's.

    Raises what `vector` raises, MalformedMessage for a value that is not finite. After an error the parameters hold
    parts of both: load again before use.
    """
    _require_little_endian()
    on_cpu = parameters.device.type == "cpu"
    memory: FloatBlock = np.empty(0 if on_cpu else BLOCK_ELEMENTS, dtype=np.float32)
    for begin, end in chain.from_iterable(blocks(part.stop, part.start) for part in parameters.held):
        vector.skip_to(begin)
        slices = list(parameters.slices(begin, end))
        if on_cpu:
            values = [tensor.numpy() for _, tensor in slices]
            vector.read(values)
        else:
            vector.read([memory[: end - begin]])
            values = [part for _, _, part in parameters.beside(memory[: end - begin], begin)]
        for (spec, tensor), part in zip(slices, values, strict=True):
            if not math.isfinite(squared_norm(part)):
                raise MalformedMessage(f"round model tensor {spec.name} has values that are not finite")
            if not on_cpu:
                with torch.no_grad():
                    tensor.copy_(torch.from_numpy(part))
    vector.skip_to()


def vector_blocks(parameters: BoundParameters) -> Iterator[bytes]:
    """The parameters as a flat little-endian float32 vector, one block per tensor."""
    _require_little_endian()
    for tensor in parameters.tensors:
        yield _values(tensor).tobytes()


def _values(tensor: torch.Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.detach().cpu().contiguous().numpy().reshape(-1)
    return values


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise ConfigurationError("this machine is big-endian: Lorica's vectors are little-endian and used in place")
