"""A plan's T5 in memory: its parameters bound to the plan's layout, its tokenizer, and which round model is in it now.

One silo's agent has one. Where several silos are trained in turn in one process they share one: what is in it is a
round model of the plan, or nobody's, and whoever needs one loads it.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import torch

from lorica_security.errors import StateError
from lorica_security.host.file_mark import FileMark
from silo_agent.service.ports import RoundModel
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.device import DeviceSettings, chosen_device
from silo_agent.training.model.model import T5, add_adapters, bind, build_model, load_fixed, load_vector
from silo_agent.training.model.vector_file import VectorReader
from silo_agent.training.ranks.ranks import ALONE, Ranks
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout, Manifest
from silo_wire.model_folders.seeded_model import seeded_adapters
from silo_wire.plans.plan import PlanBundle


class PlanModel:
    """Not for use by several threads at once."""

    def __init__(
        self, bundle: PlanBundle, settings: DeviceSettings, *, base: RoundModel | None = None, ranks: Ranks = ALONE
    ) -> None:
        """`base` is what the plan's adapters are for, where it has adapters. Of sharded `ranks` each has a part.

        Raises MalformedMessage where the bundle does not make a T5 of its own layout, ConfigurationError for the
        device, IntegrityError for a damaged base or fixed halves that the seed makes otherwise here, StateError for a
        base that is not here.
        """
        self.bundle = bundle
        self.device = chosen_device(settings)
        whole = bundle.whole_layout
        self._ranks = ranks
        self.t5: T5 = build_model(
            bundle.files, whole, device=self.device, dropout=bundle.plan.training.dropout, ranks=ranks
        )
        self.parameters = bind(self.t5, whole, ranks)
        if bundle.base_layout is not None:
            if base is None:
                raise StateError(
                    f"plan {bundle.plan.name} trains adapters, and the model that they are for is not here"
                )
            with VectorReader(base.file, base.manifest, whole, base.mark) as vector:
                load_vector(self.parameters, vector)
                vector.checked()
            self.parameters, frozen = add_adapters(self.t5, bundle.plan.adapters, bundle.layout, bundle.fixed_layout)
            if bundle.fixed_layout is not None:
                made = seeded_adapters(bundle.fixed_layout, bundle.plan.seed)
                load_fixed(frozen, bundle.fixed_layout, made, str(bundle.plan.model.fixed))
        self.tokenizer = TextTokenizer.of_model(bundle.files, self.t5.config)
        self._loaded: Digest | None = None
        self._mark: FileMark | None = None
        """Of the round model's file that was checked last, of which there is one at a time."""

    def load(self, path: Path, model: Manifest, mark: FileMark | None = None) -> None:
        """Have the round model in `path` in the parameters; read only where it is not there yet. Raises
        IntegrityError."""
        if mark is not None:
            self._mark = mark
        if self._loaded == model.digest:
            return
        self._loaded = None
        with self._ranks.all_or_none(), self.reader(path, model) as vector:
            load_vector(self.parameters, vector)
            self._mark = vector.checked()
        self._loaded = model.digest

    def largest_parameter(self) -> float:
        """In size, of all parameters; not a number where one is none."""
        ends = [torch.stack(torch.aminmax(parameter.detach())) for parameter in self.t5.parameters()]
        return float(torch.stack(ends).abs().max())

    def begin_training(self, round_number: int | None) -> Mapping[str, torch.nn.Parameter]:
        """From here on the parameters are no round model. Those that this round trains, by name and in order; no others
        have gradients until the next one begins. Without a round all of them are trained."""
        self._loaded = None
        trained = {}
        for spec, parameter in zip(self.parameters.specs, self.parameters.tensors, strict=True):
            rests = round_number is not None and self.bundle.plan.adapters.rests(spec.name, round_number)
            parameter.requires_grad_(not rests)
            if parameter.requires_grad:
                trained[spec.name] = parameter
        return trained

    def reader(self, path: Path, model: Manifest, part: range | None = None) -> VectorReader:
        """Of `part`, or of all of it."""
        return VectorReader(path, model, self._layout_of(model), self._mark, part)

    def item_bytes(self, model: Manifest) -> int:
        """Of a number of `model`."""
        return self._layout_of(model).item_bytes

    def mapped(self, path: Path, model: Manifest, names: Collection[str] | None = None) -> list[torch.Tensor]:
        """What is held of the model in `path` as tensors, or of those of `names`; on the CPU a private mapping of its
        file, whose pages the system shares and drops."""
        layout = self._layout_of(model)
        vector = torch.from_numpy(np.memmap(path, dtype=f"<i{layout.item_bytes}", mode="c"))
        vector = vector.view(torch.float32 if layout.dtype == "float32" else torch.bfloat16)
        return [
            vector[part.start : part.stop].view(tensor.shape).to(self.device)
            for spec, tensor, part in self.parameters.placed()
            if names is None or spec.name in names
        ]

    def _layout_of(self, model: Manifest) -> Layout:
        """Round models are of the plan's type; models of this silo's own are float32 in any case."""
        own = self.bundle.layout
        return own if model.layout_digest == own.digest else self.bundle.model_layout
