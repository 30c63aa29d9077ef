"""The server optimizers against hand-worked numbers, torch.optim on the same pseudo-gradients, and plain float64
arithmetic.

torch has no Yogi: it is checked by hand on both signs of its rule, against Algorithm 2 of Reddi et al. 2020 written out
in Python floats, and against Adagrad, whose sum it follows as long as the squares stay above it.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lorica_security.errors import ConfigurationError, StateError
from silo_wire.server_step.server_optimizer import (
    FED_AVG,
    OPTIMIZER_NAMES,
    Adagrad,
    Adam,
    ServerOptimizer,
    Sgd,
    Yogi,
    optimizer_named,
    slots,
    step,
)

ALL = [
    FED_AVG,
    Sgd(learning_rate=0.7, momentum=0.9),
    Adam(learning_rate=0.05),
    Yogi(learning_rate=0.05),
    Adagrad(learning_rate=0.05),
]


def fresh_state(optimizer: ServerOptimizer, like: Tensor) -> dict[str, Tensor]:
    return {name: torch.full_like(like, value) for name, value in slots(optimizer).items()}


def walk(
    optimizer: ServerOptimizer, start: Tensor, gradients: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = start.clone()
    state = fresh_state(optimizer, model)
    path = []
    for number, gradient in enumerate(gradients, start=1):
        step(optimizer, model, gradient, state, step_number=number, scratch=torch.empty_like(model))
        path.append(model.clone())
    return path, state


def random_gradients(length: int, steps: int, *, seed: int) -> list[Tensor]:
    """Pseudo-gradients as rounds give them: sizes over six decades, shrinking as training goes on, a few exact
    zeros."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** (torch.rand(length, generator=generator) * 6.0 - 6.0)
    gradients = [torch.randn(length, generator=generator) * scale / (1 + t) for t in range(steps)]
    for t, gradient in enumerate(gradients):
        gradient[t::101] = 0.0
    return gradients


@pytest.mark.parametrize(
    ("optimizer", "gradients", "expected"),
    [
        (FED_AVG, [1.0, 2.0], [-1.0, -3.0]),
        # b = 1, then 0.9 + 2 = 2.9
        (Sgd(learning_rate=0.5, momentum=0.9), [1.0, 2.0], [-0.5, -1.95]),
        # m^ = 1, v^ = 1: 1 / 1.5. Then m^ = 1.25 / 0.75, v^ = 1.1875 / 0.4375: 1.6666667 / (1.6475090 + 0.5)
        (Adam(learning_rate=1.0, beta1=0.5, beta2=0.75, tau=0.5), [1.0, 2.0], [-0.6666667, -0.6666667 - 0.7760930]),
        # v = 0.25 + 0.25 (1 is above 0.25): 0.5 / (0.7071068 + 0.5). Then v = 0.5 - 0.0625 (0.25 is below 0.5):
        # 0.5 / (0.6614378 + 0.5)
        (Yogi(learning_rate=1.0, beta1=0.5, beta2=0.75, tau=0.5), [1.0, 0.5], [-0.4142136, -0.4142136 - 0.4305009]),
        # v = 0.25 + 1: 1 / (1.1180340 + 0.5). Then v = 5.25: 2 / (2.2912878 + 0.5)
        (Adagrad(learning_rate=1.0, tau=0.5), [1.0, 2.0], [-0.6180340, -0.6180340 - 0.7165151]),
    ],
    ids=["fedavg", "fedopt-sgd", "adam", "yogi", "adagrad"],
)
def test_two_steps_by_hand(optimizer: ServerOptimizer, gradients: list[float], expected: list[float]) -> None:
    path, _ = walk(optimizer, torch.zeros(1), [torch.tensor([gradient]) for gradient in gradients])
    assert [float(model) for model in path] == pytest.approx(expected, rel=1e-6)


TORCH_TWINS: list[tuple[ServerOptimizer, Callable[[list[Tensor]], torch.optim.Optimizer]]] = [
    (FED_AVG, lambda p: torch.optim.SGD(p, lr=1.0)),
    (Sgd(learning_rate=1.0, momentum=0.9), lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9)),
    (Sgd(learning_rate=0.03, momentum=0.5), lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.5)),
    (Adam(learning_rate=0.01), lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99), eps=1e-3)),
    (
        Adam(learning_rate=1.0, beta1=0.0, beta2=0.999, tau=1e-8),
        lambda p: torch.optim.Adam(p, lr=1.0, betas=(0.0, 0.999), eps=1e-8),
    ),
    (
        Adagrad(learning_rate=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=1e-6),
    ),
]


@pytest.mark.parametrize(("optimizer", "twin"), TORCH_TWINS)
def test_equals_torch_optim_on_the_same_pseudo_gradients(
    optimizer: ServerOptimizer, twin: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    start = torch.randn(1_000, generator=torch.Generator().manual_seed(20))
    gradients = random_gradients(1_000, 12, seed=21)
    parameter = torch.nn.Parameter(start.clone())
    theirs = twin([parameter])
    path, _ = walk(optimizer, start, gradients)
    for ours, gradient in zip(path, gradients, strict=True):
        parameter.grad = gradient.clone()
        theirs.step()
        torch.testing.assert_close(ours, parameter.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_equals_the_written_out_algorithm_in_float64(name: str) -> None:
    rate, momentum, beta1, beta2, tau = 0.1, 0.9, 0.8, 0.95, 1e-2
    optimizer = optimizer_named(name, learning_rate=rate, momentum=momentum, beta1=beta1, beta2=beta2, tau=tau)
    gradients = random_gradients(50, 15, seed=22)
    path, _ = walk(optimizer, torch.zeros(50), gradients)
    for i in range(50):
        x, b, m, v = 0.0, 0.0, 0.0, 0.0 if name == "adam" else tau**2
        for t, gradient in enumerate(gradients, start=1):
            g = float(gradient[i])
            if name == "sgd":
                b = momentum * b + g
                x -= rate * b
            elif name == "adam":
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
                x -= rate * (m / (1 - beta1**t)) / (math.sqrt(v / (1 - beta2**t)) + tau)
            elif name == "yogi":
                m = beta1 * m + (1 - beta1) * g
                v -= (1 - beta2) * g * g * ((v > g * g) - (v < g * g))
                x -= rate * m / (math.sqrt(v) + tau)
            else:
                v += g * g
                x -= rate * g / (math.sqrt(v) + tau)
            assert float(path[t - 1][i]) == pytest.approx(x, rel=1e-5, abs=1e-7)


def test_yogi_adds_like_adagrad_while_squares_stay_above_its_sum() -> None:
    gradients = [torch.tensor([3.0, -5.0])] * 5
    _, yogi = walk(Yogi(learning_rate=0.1, beta2=0.9, tau=1e-3), torch.zeros(2), gradients)
    _, adagrad = walk(Adagrad(learning_rate=0.1, tau=1e-3), torch.zeros(2), gradients)
    torch.testing.assert_close(yogi["second_moment"], 0.1 * adagrad["sum_of_squares"], rtol=1e-5, atol=1e-5)


def test_yogi_forgets_slower_than_adam_when_gradients_shrink() -> None:
    gradients = [torch.tensor([10.0])] + [torch.tensor([1e-3])] * 20
    _, yogi = walk(Yogi(learning_rate=0.1, beta2=0.9), torch.zeros(1), gradients)
    _, adam = walk(Adam(learning_rate=0.1, beta2=0.9), torch.zeros(1), gradients)
    assert float(yogi["second_moment"]) == pytest.approx(10.0, rel=1e-4)
    assert float(adam["second_moment"]) == pytest.approx(10.0 * 0.9**20, rel=1e-4)


def test_slots_and_their_first_values() -> None:
    assert slots(FED_AVG) == {}
    assert slots(Sgd(learning_rate=1.0, momentum=0.9)) == {"momentum": 0.0}
    assert slots(Adam(learning_rate=1.0)) == {"first_moment": 0.0, "second_moment": 0.0}
    assert slots(Yogi(learning_rate=1.0, tau=0.5)) == {"first_moment": 0.0, "second_moment": 0.25}
    assert slots(Adagrad(learning_rate=1.0, tau=0.5)) == {"sum_of_squares": 0.25}


@pytest.mark.parametrize("optimizer", ALL)
@pytest.mark.parametrize("slab", [1, 7, 64, 333])
def test_slab_size_does_not_change_a_bit(optimizer: ServerOptimizer, slab: int) -> None:
    start = torch.randn(1_003, generator=torch.Generator().manual_seed(23))
    gradients = random_gradients(1_003, 4, seed=24)
    path, state = walk(optimizer, start, gradients)
    model, in_slabs = start.clone(), fresh_state(optimizer, start)
    for number, gradient in enumerate(gradients, start=1):
        for low in range(0, 1_003, slab):
            part = slice(low, low + slab)
            step(
                optimizer,
                model[part],
                gradient[part],
                {name: values[part] for name, values in in_slabs.items()},
                step_number=number,
                scratch=torch.empty_like(model[part]),
            )
    assert model.equal(path[-1])
    assert all(in_slabs[name].equal(values) for name, values in state.items())


@pytest.mark.parametrize("optimizer", ALL)
def test_stopping_and_going_on_with_the_saved_state_changes_nothing(optimizer: ServerOptimizer) -> None:
    start = torch.randn(100, generator=torch.Generator().manual_seed(25))
    gradients = random_gradients(100, 6, seed=26)
    path, _ = walk(optimizer, start, gradients)
    before, state = walk(optimizer, start, gradients[:3])
    model = before[-1].clone()
    for number, gradient in enumerate(gradients[3:], start=4):
        step(optimizer, model, gradient, state, step_number=number, scratch=torch.empty_like(model))
    assert model.equal(path[-1])


@pytest.mark.parametrize("optimizer", ALL)
def test_the_pseudo_gradient_is_left_alone(optimizer: ServerOptimizer) -> None:
    gradient = random_gradients(50, 1, seed=27)[0]
    copy = gradient.clone()
    walk(optimizer, torch.zeros(50), [gradient])
    assert gradient.equal(copy)


def test_a_step_on_zeros_is_not_a_round_without_a_step() -> None:
    optimizer = Sgd(learning_rate=1.0, momentum=0.9)
    path, _ = walk(optimizer, torch.zeros(1), [torch.ones(1), torch.zeros(1)])
    assert [float(model) for model in path] == pytest.approx([-1.0, -1.9])


@pytest.mark.parametrize("optimizer", ALL[1:])
@pytest.mark.parametrize("damage", ["missing", "foreign", "length", "dtype", "gradient", "number"])
def test_what_does_not_fit_is_refused_before_anything_changes(optimizer: ServerOptimizer, damage: str) -> None:
    model, gradient, number = torch.ones(4), torch.ones(4), 1
    state = fresh_state(optimizer, model)
    name = next(iter(state))
    match damage:
        case "missing":
            del state[name]
        case "foreign":
            state["third_moment"] = torch.zeros(4)
        case "length":
            state[name] = torch.zeros(3)
        case "dtype":
            state[name] = state[name].double()
        case "gradient":
            gradient = torch.ones(5)
        case "number":
            number = 0
    kept = {key: values.clone() for key, values in state.items()}
    with pytest.raises(StateError):
        step(optimizer, model, gradient, state, step_number=number, scratch=torch.empty_like(model))
    assert model.equal(torch.ones(4))
    assert all(state[key].equal(values) for key, values in kept.items())


def test_optimizers_are_known_by_their_plan_names() -> None:
    chosen = [
        optimizer_named(name, learning_rate=0.5, momentum=0.9, beta1=0.8, beta2=0.95, tau=1e-4)
        for name in OPTIMIZER_NAMES
    ]
    assert chosen == [
        Sgd(learning_rate=0.5, momentum=0.9),
        Adam(learning_rate=0.5, beta1=0.8, beta2=0.95, tau=1e-4),
        Yogi(learning_rate=0.5, beta1=0.8, beta2=0.95, tau=1e-4),
        Adagrad(learning_rate=0.5, tau=1e-4),
    ]
    with pytest.raises(ConfigurationError, match="'rmsprop' is unknown: use one of sgd, adam, yogi, adagrad"):
        optimizer_named("rmsprop", learning_rate=0.5, momentum=0.9, beta1=0.8, beta2=0.95, tau=1e-4)


BAD = {
    "learning_rate": [0.0, -1.0, math.inf, math.nan],
    "momentum": [-0.1, 1.0, math.nan],
    "beta1": [-0.1, 1.0, math.nan],
    "beta2": [-0.1, 1.0, math.nan],
    "tau": [0.0, -1e-3, 1e-30, math.inf, math.nan],
}
KEYS = {
    "sgd": ["learning_rate", "momentum"],
    "adam": ["learning_rate", "beta1", "beta2", "tau"],
    "yogi": ["learning_rate", "beta1", "beta2", "tau"],
    "adagrad": ["learning_rate", "tau"],
}


@pytest.mark.parametrize(
    ("name", "key", "value"),
    list(itertools.chain.from_iterable(((n, k, v) for v in BAD[k]) for n, keys in KEYS.items() for k in keys)),
)
def test_a_hyperparameter_outside_its_range_is_refused_by_key(name: str, key: str, value: float) -> None:
    fields = {"learning_rate": 1.0, "momentum": 0.0, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3, key: value}
    with pytest.raises(ConfigurationError, match=f"^{key} of server optimizer {name} is"):
        optimizer_named(name, **fields)
