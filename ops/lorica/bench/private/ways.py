"""What is measured: the ways to train, and what each is compared with. A further way is a further line here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from silo_agent.training.private.clipping import Backend

Adapters = Literal["none", "lora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """`backend` is how gradients per example are had, None without differential privacy; times are set beside those of
    `beside`."""

    backend: Backend | None = None
    adapters: Adapters = "none"
    beside: str | None = None


WAYS: Mapping[str, Way] = {
    "plain": Way(),
    "ghost": Way(backend="ghost", beside="plain"),
    "loop": Way(backend="loop", beside="plain"),
    "plain-lora": Way(adapters="lora", beside="plain"),
    "ghost-lora": Way(backend="ghost", adapters="lora", beside="plain-lora"),
}
