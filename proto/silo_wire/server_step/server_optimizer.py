"""The server optimizers of FedOPT, as values and one elementwise step.

An optimizer is a frozen dataclass of hyperparameters; its state is a few vectors as long as the model, one per slot.
`step` works on any slab of model, pseudo-gradient and state alike, because no element looks at another. For a
pseudo-gradient g, step t = 1, 2, ...:

    sgd      b = momentum * b + g                               x = x - lr * b                (b = g without momentum)
    adam     m = beta1 * m + (1 - beta1) * g                    x = x - lr * m^ / (sqrt(v^) + tau)
             v = beta2 * v + (1 - beta2) * g^2                  m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t)
    yogi     m as in adam                                       x = x - lr * m / (sqrt(v) + tau)
             v = v - (1 - beta2) * g^2 * sign(v - g^2)
    adagrad  v = v + g^2                                        x = x - lr * g / (sqrt(v) + tau)

sgd with learning rate 1 and momentum 0 is FedAvg; with momentum 0.9 it is the FedOPT of Zhang et al. 2023. Yogi and
Adagrad are Algorithm 2 of Reddi et al. 2020 (arXiv 2003.00295): v begins at tau^2, nothing is bias-corrected. Adagrad
has beta1 = 0, which makes it torch.optim.Adagrad(eps=tau, initial_accumulator_value=tau**2). Adam departs from that
algorithm: it begins at zero and is bias-corrected (Kingma & Ba 2015), which makes it torch.optim.Adam(eps=tau), the
Adam that people know. A federation has few rounds, and uncorrected moments step up to about twice too far in the first
of them.

Every tensor operation rounds once per element.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from lorica_security.errors import ConfigurationError, StateError

# tau must survive as a float32, and its square too.
SMALLEST_TAU = 1e-12


def _require_learning_rate(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ConfigurationError(f"learning_rate of server optimizer {name} is {value!r}: set a finite number above 0")


def _require_decay(name: str, key: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ConfigurationError(f"{key} of server optimizer {name} is {value!r}: set at least 0 and below 1")


def _require_tau(name: str, value: float) -> None:
    if not SMALLEST_TAU <= value < math.inf:
        raise ConfigurationError(
            f"tau of server optimizer {name} is {value!r}: set a finite number of at least {SMALLEST_TAU:g}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    learning_rate: float
    momentum: float = 0.0

    def __post_init__(self) -> None:
        _require_learning_rate("sgd", self.learning_rate)
        _require_decay("sgd", "momentum", self.momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adam:
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _require_learning_rate("adam", self.learning_rate)
        _require_decay("adam", "beta1", self.beta1)
        _require_decay("adam", "beta2", self.beta2)
        _require_tau("adam", self.tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class Yogi:
    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _require_learning_rate("yogi", self.learning_rate)
        _require_decay("yogi", "beta1", self.beta1)
        _require_decay("yogi", "beta2", self.beta2)
        _require_tau("yogi", self.tau)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    learning_rate: float
    tau: float = 1e-3

    def __post_init__(self) -> None:
        _require_learning_rate("adagrad", self.learning_rate)
        _require_tau("adagrad", self.tau)


OPTIMIZER_NAMES = ("sgd", "adam", "yogi", "adagrad")
ServerOptimizer = Sgd | Adam | Yogi | Adagrad

FED_AVG = Sgd(learning_rate=1.0, momentum=0.0)


def optimizer_named(
    name: str, *, learning_rate: float, momentum: float, beta1: float, beta2: float, tau: float
) -> ServerOptimizer:
    """The optimizer that a plan names; it takes the hyperparameters it has and leaves the others.

    Raises ConfigurationError for another name or a value outside its range.
    """
    match name:
        case "sgd":
            return Sgd(learning_rate=learning_rate, momentum=momentum)
        case "adam":
            return Adam(learning_rate=learning_rate, beta1=beta1, beta2=beta2, tau=tau)
        case "yogi":
            return Yogi(learning_rate=learning_rate, beta1=beta1, beta2=beta2, tau=tau)
        case "adagrad":
            return Adagrad(learning_rate=learning_rate, tau=tau)
    raise ConfigurationError(f"server optimizer {name!r} is unknown: use one of {', '.join(OPTIMIZER_NAMES)}")


def at_rate(optimizer: ServerOptimizer, rate: float) -> ServerOptimizer:
    """The optimizer with `rate` times its learning rate."""
    return optimizer if rate == 1.0 else replace(optimizer, learning_rate=rate * optimizer.learning_rate)


def slots(optimizer: ServerOptimizer) -> dict[str, float]:
    """The names of the state's vectors, each with the number that fills it before the first step."""
    match optimizer:
        case Sgd():
            return {"momentum": 0.0} if optimizer.momentum > 0.0 else {}
        case Adam():
            return {"first_moment": 0.0, "second_moment": 0.0}
        case Yogi():
            return {"first_moment": 0.0, "second_moment": optimizer.tau * optimizer.tau}
        case Adagrad():
            return {"sum_of_squares": optimizer.tau * optimizer.tau}
        case _:
            assert_never(optimizer)


def step(
    optimizer: ServerOptimizer,
    model: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    *,
    step_number: int,
    scratch: Tensor,
) -> None:
    """Apply one step to a slab of the model and of each state slot, in place; the pseudo-gradient `gradient` stays.

    `scratch` is overwritten. All are float32 of one shape, on one device. `step_number` counts from 1 the steps that
    this model has taken, this one included; a round whose outcome is zero_weight takes none. (Feeding it zeros would be
    another thing: momentum would still move the model.) Raises StateError for slots, shapes or a step number that do
    not fit, before anything changes.
    """
    _require_matching(optimizer, model, gradient, state, step_number, scratch)
    match optimizer:
        case Sgd():
            _sgd(optimizer, model, gradient, state, scratch)
        case Adam():
            _adam(optimizer, model, gradient, state, step_number, scratch)
        case Yogi():
            _yogi(optimizer, model, gradient, state, scratch)
        case Adagrad():
            _adagrad(optimizer, model, gradient, state, scratch)
        case _:
            assert_never(optimizer)


def _sgd(optimizer: Sgd, model: Tensor, gradient: Tensor, state: Mapping[str, Tensor], scratch: Tensor) -> None:
    direction = gradient
    if optimizer.momentum > 0.0:
        direction = state["momentum"].mul_(optimizer.momentum).add_(gradient)
    if optimizer.learning_rate != 1.0:
        direction = torch.mul(direction, optimizer.learning_rate, out=scratch)
    model.sub_(direction)


def _adam(
    optimizer: Adam, model: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step_number: int, scratch: Tensor
) -> None:
    first, second = state["first_moment"], state["second_moment"]
    torch.mul(gradient, 1.0 - optimizer.beta1, out=scratch)
    first.mul_(optimizer.beta1).add_(scratch)
    torch.mul(gradient, gradient, out=scratch).mul_(1.0 - optimizer.beta2)
    second.mul_(optimizer.beta2).add_(scratch)
    first_correction = 1.0 - _power(optimizer.beta1, step_number)
    second_correction = 1.0 - _power(optimizer.beta2, step_number)
    torch.sqrt(second, out=scratch).mul_(1.0 / math.sqrt(second_correction)).add_(optimizer.tau)
    torch.div(first, scratch, out=scratch).mul_(optimizer.learning_rate / first_correction)
    model.sub_(scratch)


def _power(base: float, exponent: int) -> float:
    """By multiplications alone, each of which rounds once: `**` is the library's, whose last bit depends on the
    processor."""
    power = 1.0
    while exponent:
        if exponent & 1:
            power *= base
        base *= base
        exponent >>= 1
    return power


def _yogi(optimizer: Yogi, model: Tensor, gradient: Tensor, state: Mapping[str, Tensor], scratch: Tensor) -> None:
    first, second = state["first_moment"], state["second_moment"]
    torch.mul(gradient, 1.0 - optimizer.beta1, out=scratch)
    first.mul_(optimizer.beta1).add_(scratch)
    torch.mul(gradient, gradient, out=scratch)
    direction = torch.sub(second, scratch).sign_()
    second.sub_(scratch.mul_(1.0 - optimizer.beta2).mul_(direction))
    torch.sqrt(second, out=scratch).add_(optimizer.tau)
    torch.div(first, scratch, out=scratch).mul_(optimizer.learning_rate)
    model.sub_(scratch)


def _adagrad(optimizer: Adagrad, model: Tensor, gradient: Tensor, state: Mapping[str, Tensor], scratch: Tensor) -> None:
    sum_of_squares = state["sum_of_squares"]
    torch.mul(gradient, gradient, out=scratch)
    sum_of_squares.add_(scratch)
    torch.sqrt(sum_of_squares, out=scratch).add_(optimizer.tau)
    torch.div(gradient, scratch, out=scratch).mul_(optimizer.learning_rate)
    model.sub_(scratch)


def _require_matching(
    optimizer: ServerOptimizer,
    model: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    step_number: int,
    scratch: Tensor,
) -> None:
    if step_number < 1:
        raise StateError(f"step number {step_number} of the server optimizer is below 1: count its steps from 1")
    wanted = tuple(slots(optimizer))
    if set(state) != set(wanted):
        raise StateError(
            f"the server optimizer's state holds {sorted(state)}, it needs {sorted(wanted)}: "
            "begin anew or restore the state that belongs to this optimizer"
        )
    for name, tensor in {"model": model, "pseudo-gradient": gradient, "scratch": scratch, **state}.items():
        if tensor.dtype != torch.float32 or tensor.shape != model.shape or tensor.device != model.device:
            raise StateError(
                f"the slab of {name} is {tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}: "
                f"expected torch.float32 of shape {tuple(model.shape)} on {model.device}, as the model's"
            )
