"""What a private training did, step by step, seen from inside: a tape of the
sums before noise, the noise, and what was drawn.

The product has no door through which an exact sum could leave. The audit puts its own functions around the product's,
in its own process, for as long as one training takes. What it holds on to is all in `_around`, and in `summed`, which
knows in what unit the product keeps a sum: who moves one of these moves it there.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lorica.privacy_audit.checks import replaced
from lorica_security.noise.random_words import RandomWords
from silo_agent.training import silo_trainer
from silo_agent.training.private import joint_gradient, private_trainer
from silo_agent.training.private.loss_sums import GRID
from silo_agent.training.private.private_optimizer import PrivateOptimizer

Vector = NDArray[np.float64]
Floats = NDArray[np.float32]

_FAR = 1 << 20
"""Bounds by which two sums of losses are apart where the noise on their
difference is measured: so that no noise takes it below 0.
"""


@dataclass(slots=True)
class Step:
    """One release of gradients. `total` and `noise` are flat, in the order of the model's parameters."""

    total: Vector
    """The sum before noise, in units of the gradient."""
    noise: Floats
    used: Floats
    """What the optimizer was given: the noised sum over the plan's divisor."""


@dataclass(slots=True)
class Weight:
    """One release of a scaled loss reduction. `sums` are those of the losses, in units
    of the loss; `noise` was drawn as that of the release.
    """

    sums: Vector
    released: float
    noise: Vector


@dataclass(slots=True)
class Tape:
    """Of one training. `keys` are those that its randomness came from;
    `foreign` of them are not what the operating system gave.
    """

    sizes: tuple[int, ...] = ()
    """Of the tensors that are trained, in order."""
    drawn: list[list[int]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    foreign: int = 0


@contextmanager
def taped(*, loss_draws: int) -> Iterator[Tape]:
    """A tape of the one training that is made while this is open; the weight's noise is drawn `loss_draws` times more.

    torch's own generator begins with the same seed each time, so that noise that
    came from it would be the same in two trainings.
    """
    tape = Tape()
    with ExitStack() as opened:
        opened.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(0)
        for owner, name, around in _around(tape, loss_draws):
            opened.enter_context(replaced(owner, name, around(getattr(owner, name))))
        yield tape


def _around(tape: Tape, loss_draws: int) -> Sequence[tuple[Any, str, Callable[[Any], Any]]]:
    """Whose function of which name is replaced, and by what."""
    entropy: set[bytes] = set()
    pending: list[Vector] = []

    def add_noise(original: Any) -> Any:
        def taped_noise(optimizer: PrivateOptimizer) -> None:
            tape.sizes = tuple(parameter.numel() for parameter in optimizer.params)
            total = _flat(summed(optimizer))
            original(optimizer)
            noised = _flat([parameter.grad for parameter in optimizer.params])
            pending[:] = [total, noised - total]

        return taped_noise

    def pre_step(original: Any) -> Any:
        def taped_step(optimizer: PrivateOptimizer, *arguments: Any) -> Any:
            answer = original(optimizer, *arguments)
            total, noise = pending
            used = _flat([parameter.grad for parameter in optimizer.params])
            tape.steps.append(Step(total, noise.astype(np.float32), used.astype(np.float32)))
            pending.clear()
            return answer

        return taped_step

    def drawn_examples(original: Any) -> Any:
        def taped_sample(*arguments: Any, **named: Any) -> list[int]:
            drawn: list[int] = original(*arguments, **named)
            tape.drawn.append(list(drawn))
            return drawn

        return taped_sample

    def noised_reduction(original: Any) -> Any:
        def taped_weight(before: int, after: int, *, bound: float, **named: Any) -> float:
            released: float = original(before, after, bound=bound, **named)
            measured = [original(_FAR * GRID, 0, bound=bound, **{**named, "cap": np.inf}) for _ in range(loss_draws)]
            sums = np.array([before, after], dtype=np.float64) * (bound / GRID)
            tape.weights.append(Weight(sums, released, np.array(measured) - _FAR * bound))
            return released

        return taped_weight

    def token_bytes(original: Any) -> Any:
        def taped_entropy(count: int | None = None) -> bytes:
            made: bytes = original(count)
            entropy.add(made)
            return made

        return taped_entropy

    def random_words(original: Any) -> Any:
        def taped_key(key: bytes) -> RandomWords:
            tape.keys.append(key)
            tape.foreign += key not in entropy
            words: RandomWords = original(key)
            return words

        return taped_key

    return (
        (PrivateOptimizer, "add_noise", add_noise),
        (PrivateOptimizer, "pre_step", pre_step),
        (private_trainer, "drawn_examples", drawn_examples),
        (joint_gradient, "drawn_examples", drawn_examples),
        (private_trainer, "noised_reduction", noised_reduction),
        (secrets, "token_bytes", token_bytes),
        (silo_trainer, "RandomWords", random_words),
    )


def summed(optimizer: PrivateOptimizer) -> list[torch.Tensor]:
    """The sum of clipped gradients as it is before noise, parameter by
    parameter, in float64; zeros of an empty sample.
    """
    return [
        torch.zeros_like(parameter, dtype=torch.float64)
        if parameter.summed_grad is None
        else parameter.summed_grad.detach().double().clone()
        for parameter in optimizer.params
    ]


def _flat(parts: Sequence[torch.Tensor]) -> Vector:
    """One after the other."""
    flat: Vector = torch.cat([part.detach().flatten().double().cpu() for part in parts]).numpy()
    return flat
