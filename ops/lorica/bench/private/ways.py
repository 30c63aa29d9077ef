"""What is measured: the ways to train, and what each is compared with. A further way is a further line here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from silo_agent.training.private.clipping import Backend

Adapters = Literal["none", "lora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`backend` is how gradients per example are had, None without differential privacy; times are set beside those of
    `beside`. `training` are keys of a plan's [training] that differ."""

    backend: Backend | None = None
    adapters: Adapters = "none"
    beside: str | None = None
    training: Mapping[str, object] = field(default_factory=dict)


WAYS: Mapping[str, Way] = {
    "plain": Way(),
    "ghost": Way(backend="ghost", beside="plain"),
    "loop": Way(backend="loop", beside="plain"),
    "plain-lora": Way(adapters="lora", beside="plain"),
    "ghost-lora": Way(backend="ghost", adapters="lora", beside="plain-lora"),
    "plain-bfloat16": Way(beside="plain", training={"precision": "bfloat16"}),
    "plain-again": Way(beside="plain", training={"gradient_checkpointing": True}),
    "plain-lengths": Way(beside="plain", training={"length_grouping": 8}),
}
