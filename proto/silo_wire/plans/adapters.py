"""`[adapters]` of a plan: LoRA (Hu et al. 2022). The model stays as it is; low-rank additions to it are trained and
travel.

A linear layer of weight W, shape (out, in), gets A, shape (rank, in), and B, shape (out, rank), and computes with W +
alpha / rank x B A. In a plan with adapters `layout.json` is that of what travels of A and B, and so are models,
updates, masks and optimizer state. The parameters that stay, the base, are named by a digest of their own and fetched
once.

The mean of B times the mean of A is not the mean of B A. `train` says what becomes of that:

    both        A and B are trained in every round, and the mean is off by a mean of products of silos' deltas
    b           A is what the plan's seed makes and stays; B alone is trained and travels (FFA-LoRA, Sun et al. 2024)
    alternate   B is trained in rounds of odd numbers, A in the others (RoLoRA, Chen et al. 2024); the half that rests
                is zero in every delta, and neither its parameters nor their optimizer state move
    reproject   A and B are trained in every round, and the next B A is the mean of the silos' B A, cut to its rank by
                singular values (FlexLoRA, Bai et al. 2024): off by the singular values that are cut off

Of `b` and `alternate` the mean is exact, since B A is linear in the one half that moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from lorica_security.console.strict_toml import Section
from lorica_security.errors import ConfigurationError
from silo_wire.manifest import Layout, TensorSpec

AdaptedLayer = Literal["q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"]
"""Linear layers of T5 by the last part of their names: of attention, and of the feed-forward block (v1.1 has wi_0 and
wi_1)."""
Train = Literal["both", "b", "alternate", "reproject"]
"""Which half of an adapter a round trains."""
Stretch = tuple[int, int]
"""Elements of a flat vector, from the first until before the second."""
_WEIGHT = ".weight"
_A, _B = ".lora_A", ".lora_B"


def _of_attention() -> list[AdaptedLayer]:
    return ["q", "v"]


class AdaptersSection(Section):
    rank: Annotated[int, Field(ge=0, le=1024)] = 0  # 0: the whole model is trained
    alpha: Annotated[int, Field(ge=1, le=4096)] = 16
    layers: list[AdaptedLayer] = Field(default_factory=_of_attention, min_length=1)
    train: Train = "both"

    @model_serializer(mode="wrap")
    def _as_before_there_was_a_choice(self, dump: SerializerFunctionWrapHandler) -> Mapping[str, Any]:
        """Without `train` where it is "both": such plans are spelled as before there was a choice."""
        return {key: value for key, value in dump(self).items() if (key, value) != ("train", "both")}

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

    @property
    def fixes_a(self) -> bool:
        """Whether A is what the plan's seed makes, for good."""
        return bool(self.rank) and self.train == "b"

    @property
    def reprojects(self) -> bool:
        """Whether the mean is of the products B A, cut to their rank."""
        return bool(self.rank) and self.train == "reproject"

    def rests(self, name: str, round_number: int) -> bool:
        """Whether the parameter `name` is left as it is in this round; the plan and the number alone say it."""
        return self.train == "alternate" and name.endswith((_A if round_number % 2 else _B) + _WEIGHT)


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
    return f"{layer}{_A}{_WEIGHT}", f"{layer}{_B}{_WEIGHT}"


def adapter_layout(base: Layout, section: AdaptersSection) -> Layout:
    """The canonical layout of what travels of the adapters that `section` gives a model of layout `base`."""
    halves = _halves_of_b(base, section)
    return _sorted(halves if section.fixes_a else [*_halves_of_a(base, section), *halves])


def fixed_layout(base: Layout, section: AdaptersSection) -> Layout | None:
    """That of the A that stay what the plan's seed makes; None where there are none."""
    return _sorted(_halves_of_a(base, section)) if section.fixes_a else None


def _halves_of_a(base: Layout, section: AdaptersSection) -> list[TensorSpec]:
    return [TensorSpec(adapter_names(it.name)[0], (section.rank, it.shape[1])) for it in adapted(base, section)]


def _halves_of_b(base: Layout, section: AdaptersSection) -> list[TensorSpec]:
    return [TensorSpec(adapter_names(it.name)[1], (it.shape[0], section.rank)) for it in adapted(base, section)]


def _sorted(tensors: list[TensorSpec]) -> Layout:
    return Layout("float32", tuple(sorted(tensors, key=lambda tensor: tensor.name)))


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one weight of shape (rows, columns), side by side in a plan's flat vector: A, (rank, columns), comes
    first, then B, (rows, rank), both row by row."""

    rank: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.rank * (self.rows + self.columns)


def pairs_of(layout: Layout) -> tuple[Pair, ...]:
    """What a flat vector of `layout`, of both halves of adapters, consists of, in order.

    Names are sorted, and nothing sorts between x.lora_A.weight and x.lora_B.weight. Raises ConfigurationError for
    another layout.
    """
    pairs = []
    for a, b in zip(layout.tensors[::2], layout.tensors[1::2], strict=False):
        if adapter_names(a.name.removesuffix(_A + _WEIGHT)) != (a.name, b.name) or a.shape[0] != b.shape[1]:
            raise ConfigurationError(
                f"{a.name} and {b.name} are not A and B of one weight: make a new plan with coordinator plan new"
            )
        pairs.append(Pair(rank=a.shape[0], rows=b.shape[0], columns=a.shape[1]))
    if sum(pair.elements for pair in pairs) != layout.parameters:
        raise ConfigurationError(
            f"{layout.tensors[-1].name} has no other half beside it: make a new plan with coordinator plan new"
        )
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class Turns:
    """Which stretches of a plan's flat vector rest in rounds of odd numbers, and which in the others."""

    odd: tuple[Stretch, ...] = ()
    even: tuple[Stretch, ...] = ()

    @classmethod
    def of(cls, layout: Layout, section: AdaptersSection) -> "Turns":
        def resting(round_number: int) -> tuple[Stretch, ...]:
            return tuple(
                (start, start + tensor.elements)
                for tensor, start in layout.placed()
                if section.rests(tensor.name, round_number)
            )

        return cls(odd=resting(1), even=resting(2))

    def resting(self, round_number: int, begin: int, elements: int) -> list[slice]:
        """What of the `elements` from `begin` on rests in this round, counted from `begin`."""
        end = begin + elements
        return [
            slice(max(first, begin) - begin, min(last, end) - begin)
            for first, last in (self.odd if round_number % 2 else self.even)
            if first < end and begin < last
        ]


NOTHING_RESTS: Final = Turns()


def _layer_of(name: str) -> str:
    return name.removesuffix(_WEIGHT).rpartition(".")[2] if name.endswith(_WEIGHT) else ""
