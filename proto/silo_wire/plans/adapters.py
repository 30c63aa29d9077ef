"""`[adapters]` of a plan: LoRA (Hu et al. 2022). The model stays as it is; low-rank additions to it are trained and
travel.

A linear layer of weight W, shape (out, in), gets A, shape (rank, in), and B, shape (out, rank), and computes with W +
alpha / rank x B A. In a plan with adapters `layout.json` is that of A and B alone, and so are models, updates, masks
and optimizer state. The parameters that stay, the base, are named by a digest of their own and fetched once.
"""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from lorica_security.console.strict_toml import Section
from lorica_security.errors import ConfigurationError
from silo_wire.manifest import Layout, TensorSpec

AdaptedLayer = Literal["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"]
"""Linear layers of T5 by the last part of their names: of attention, and of the feed-forward block (v1.1 has wi_0 and
wi_1)."""
_WEIGHT = ".weight"


def _of_attention() -> list[AdaptedLayer]:
    return ["q", "v"]


class AdaptersSection(Section):
    rank: Annotated[int, Field(ge=0, le=1024)] = 0  # 0: the whole model is trained
    alpha: Annotated[int, Field(ge=1, le=4096)] = 16
    layers: list[AdaptedLayer] = Field(default_factory=_of_attention, min_length=1)

    @field_validator("layers")
    @classmethod
    def _each_once(cls, value: list[AdaptedLayer]) -> list[AdaptedLayer]:
        if len(set(value)) != len(value):
            raise ValueError(f"{value} names a layer twice: name each once")
        return value

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


def adapted(base: Layout, section: AdaptersSection) -> list[TensorSpec]:
    """The weights of `base` that get an adapter; raises ConfigurationError where `layers` names one that it does not
    have."""
    weights = [tensor for tensor in base.tensors if len(tensor.shape) == 2 and _layer_of(tensor.name) in section.layers]
    missing = set(section.layers) - {_layer_of(tensor.name) for tensor in weights}
    if missing:
        raise ConfigurationError(
            f"[adapters] layers names {min(missing)!r}, which this model does not have: T5 has wi, T5 v1.1 wi_0 and "
            "wi_1"
        )
    return weights


def adapter_names(weight: str) -> tuple[str, str]:
    """What A and B of a weight are called."""
    layer = weight.removesuffix(_WEIGHT)
    return f"{layer}.lora_A{_WEIGHT}", f"{layer}.lora_B{_WEIGHT}"


def adapter_layout(base: Layout, section: AdaptersSection) -> Layout:
    """The canonical layout of the adapters that `section` gives a model of layout `base`."""
    tensors = []
    for tensor in adapted(base, section):
        (high, wide), (a, b) = tensor.shape, adapter_names(tensor.name)
        tensors += [TensorSpec(a, (section.rank, wide)), TensorSpec(b, (high, section.rank))]
    return Layout("float32", tuple(sorted(tensors, key=lambda tensor: tensor.name)))


def _layer_of(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2] if name.endswith(_WEIGHT) else ""
