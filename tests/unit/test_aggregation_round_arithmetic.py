"""A whole round on tensors: every weighting with every server optimizer, the sign, and what an error may not touch."""

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorica_coordinator.aggregation.delta_norm import norm_of, sum_of_squares
from lorica_coordinator.aggregation.round_arithmetic import aggregate_slab
from lorica_coordinator.aggregation.weighting import NO_CAPS, SiloSummary, WeightCaps, weigh
from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.identifiers import SiloName, silo_name
from silo_wire.server_step.pseudo_gradient import pseudo_gradient
from silo_wire.server_step.server_optimizer import FED_AVG, Adagrad, Adam, ServerOptimizer, Sgd, Yogi, slots
from silo_wire.weightings.equal import EQUAL
from silo_wire.weightings.fednova import FEDNOVA
from silo_wire.weightings.lorar import LORAR
from silo_wire.weightings.loss_reduction import LOSS_REDUCTION
from silo_wire.weightings.named import WEIGHTINGS
from silo_wire.weightings.q_fedavg import Q_FEDAVG
from silo_wire.weightings.size import SIZE
from silo_wire.weightings.sqrt_size import SQRT_SIZE
from silo_wire.weightings.weighting import Weighting

NAMES = [silo_name(name) for name in ("bank", "clinic", "hospital")]
OPTIMIZERS = [
    FED_AVG,
    Sgd(learning_rate=1.0, momentum=0.9),
    Adam(learning_rate=0.01),
    Yogi(learning_rate=0.01),
    Adagrad(learning_rate=0.01),
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, and this machine has none")


def random_round(length: int, *, seed: int) -> dict[SiloName, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {silo: torch.randn(length, generator=generator) * 0.1 for silo in NAMES}


def in_order(
    deltas: dict[SiloName, Tensor], part: slice = slice(None), device: str = "cpu"
) -> Iterator[tuple[SiloName, Tensor]]:
    return ((silo, delta[part].to(device)) for silo, delta in sorted(deltas.items()))


def summaries_of(deltas: dict[SiloName, Tensor]) -> list[SiloSummary]:
    facts = dict(zip(NAMES, [(100, 2.0), (300, 0.5), (600, 0.125)], strict=True))
    return [
        SiloSummary(
            silo=silo,
            examples=facts[silo][0],
            loss_reduction=facts[silo][1],
            optimizer_steps=1,
            delta_norm=norm_of([sum_of_squares(delta.numpy().tobytes(), "float32")]),
            loss_first=facts[silo][1],
        )
        for silo, delta in deltas.items()
    ]


def run_rounds(
    optimizer: ServerOptimizer,
    rounds: Sequence[dict[SiloName, Tensor]],
    *,
    weighting: Weighting = LORAR,
    caps: WeightCaps = NO_CAPS,
    slab: int | None = None,
    device: str = "cpu",
) -> tuple[Tensor, dict[str, Tensor]]:
    length = len(rounds[0][NAMES[0]])
    model = torch.linspace(-1.0, 1.0, length).to(device)
    state = {name: torch.full_like(model, value) for name, value in slots(optimizer).items()}
    for number, deltas in enumerate(rounds, start=1):
        cohort = weigh(summaries_of(deltas), weighting=weighting, caps=caps)
        for low in range(0, length, slab or length):
            part = slice(low, low + (slab or length))
            aggregate_slab(
                model[part],
                in_order(deltas, part, device),
                cohort,
                optimizer,
                {name: values[part] for name, values in state.items()},
                step_number=number,
            )
    return model, state


def test_the_pseudo_gradient_is_minus_the_mean_delta() -> None:
    mean = torch.tensor([1.0, -2.0])
    assert pseudo_gradient(mean).tolist() == [-1.0, 2.0]


def test_lorar_with_fedavg_by_hand() -> None:
    # Weights 200, 150, 75 of 425.
    deltas = {silo: torch.tensor([value]) for silo, value in zip(NAMES, [4.25, -8.5, 17.0], strict=True)}
    model, _ = run_rounds(FED_AVG, [deltas])
    assert float(model[0]) == pytest.approx(-1.0 + (200 * 4.25 - 150 * 8.5 + 75 * 17.0) / 425, rel=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_first_moves_the_way_the_deltas_point(optimizer: ServerOptimizer) -> None:
    deltas = {silo: torch.tensor([0.5, -0.5]) for silo in NAMES}
    model, _ = run_rounds(optimizer, [deltas])
    moved = model - torch.linspace(-1.0, 1.0, 2)
    assert moved[0] > 0.0 > moved[1]


@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda it: it.name)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_weighting_with_every_optimizer_in_float64(optimizer: ServerOptimizer, weighting: Weighting) -> None:
    rounds = [random_round(64, seed=30 + r) for r in range(4)]
    weights = {
        LORAR: [200.0, 150.0, 75.0],
        SIZE: [100.0, 300.0, 600.0],
        SQRT_SIZE: [10.0, 300.0**0.5, 600.0**0.5],
        LOSS_REDUCTION: [2.0, 0.5, 0.125],
        EQUAL: [1.0, 1.0, 1.0],
        FEDNOVA: [100.0, 300.0, 600.0],  # one step each
        Q_FEDAVG: [200.0, 150.0, 75.0],  # the loss fell to nothing
    }[weighting]
    parameter = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 64).double())
    first, second = torch.zeros(64).double(), torch.full((64,), 1e-6).double()
    reference: torch.optim.Optimizer | None = None
    match optimizer:
        case Sgd():
            reference = torch.optim.SGD([parameter], lr=1.0, momentum=optimizer.momentum)
        case Adam():
            reference = torch.optim.Adam([parameter], lr=0.01, betas=(0.9, 0.99), eps=1e-3)
        case Adagrad():
            reference = torch.optim.Adagrad([parameter], lr=0.01, eps=1e-3, initial_accumulator_value=1e-6)
        case Yogi():
            pass
    for deltas in rounds:
        mean = sum(w * deltas[silo].double() for w, silo in zip(weights, NAMES, strict=True)) / sum(weights)
        assert isinstance(mean, Tensor)
        if reference is not None:
            parameter.grad = -mean
            reference.step()
        else:
            first = 0.9 * first - 0.1 * mean
            second = second - 0.01 * mean**2 * torch.sign(second - mean**2)
            parameter.data -= 0.01 * first / (second.sqrt() + 1e-3)
    model, _ = run_rounds(optimizer, rounds, weighting=weighting)
    torch.testing.assert_close(model.double(), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_one_silo_with_fedavg_gives_exactly_its_own_model() -> None:
    generator = torch.Generator().manual_seed(31)
    model, delta = torch.randn(1_000, generator=generator), torch.randn(1_000, generator=generator)
    expected = model + delta
    summary = SiloSummary(
        silo=NAMES[0],
        examples=3,
        loss_reduction=0.1,
        optimizer_steps=1,
        delta_norm=norm_of([sum_of_squares(delta.numpy().tobytes(), "float32")]),
    )
    cohort = weigh([summary], weighting=LORAR)
    aggregate_slab(model, [(NAMES[0], delta)], cohort, FED_AVG, {}, step_number=1)
    assert model.equal(expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("order", list(itertools.permutations(NAMES)))
def test_permuting_the_silos_does_not_change_a_bit(optimizer: ServerOptimizer, order: tuple[SiloName, ...]) -> None:
    rounds = [random_round(257, seed=40 + r) for r in range(2)]
    model, _ = run_rounds(optimizer, rounds)
    permuted, _ = run_rounds(optimizer, [{silo: deltas[silo] for silo in order} for deltas in rounds])
    assert permuted.equal(model)


@settings(deadline=None)
@given(st.sampled_from(OPTIMIZERS), st.integers(1, 300), st.integers(1, 310))
def test_slab_size_does_not_change_a_bit(optimizer: ServerOptimizer, length: int, slab: int) -> None:
    rounds = [random_round(length, seed=50 + r) for r in range(2)]
    caps = WeightCaps(max_weight_share=0.4, max_delta_norm=0.5)
    whole, whole_state = run_rounds(optimizer, rounds, caps=caps)
    parts, parts_state = run_rounds(optimizer, rounds, caps=caps, slab=slab)
    assert parts.equal(whole)
    assert all(parts_state[name].equal(values) for name, values in whole_state.items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_poisoned_delta_changes_neither_model_nor_state(optimizer: ServerOptimizer) -> None:
    deltas = random_round(10, seed=60)
    cohort = weigh(summaries_of(deltas), weighting=LORAR)
    deltas[NAMES[1]][9] = math.nan
    model = torch.zeros(10)
    state = {name: torch.full_like(model, value) for name, value in slots(optimizer).items()}
    kept = {name: values.clone() for name, values in state.items()}
    with pytest.raises(MalformedMessage, match="silo clinic"):
        aggregate_slab(model, in_order(deltas), cohort, optimizer, state, step_number=1)
    assert model.equal(torch.zeros(10))
    assert all(state[name].equal(values) for name, values in kept.items())


def test_a_model_replacement_attack_moves_the_model_by_no_more_than_its_capped_part() -> None:
    deltas = random_round(100, seed=61)
    deltas[NAMES[2]] = torch.full((100,), 1e6)
    honest = dict(deltas) | {NAMES[2]: torch.zeros(100)}
    caps = WeightCaps(max_weight_share=0.4, max_delta_norm=1.0)
    cohort = weigh(summaries_of(deltas), weighting=SIZE, caps=caps)
    attacked, spared = torch.zeros(100), torch.zeros(100)
    aggregate_slab(attacked, in_order(deltas), cohort, FED_AVG, {}, step_number=1)
    aggregate_slab(spared, in_order(honest), cohort, FED_AVG, {}, step_number=1)
    assert float((attacked - spared).double().norm()) == pytest.approx(0.4, rel=1e-5)


@pytest.mark.parametrize(("optimizer", "size"), [(Sgd(learning_rate=1e30), 1e20), (Adam(learning_rate=0.1), 1e20)])
def test_a_step_out_of_range_is_refused(optimizer: ServerOptimizer, size: float) -> None:
    # Adam's second moment would become infinite and freeze the parameter for good, though the model stays finite.
    deltas = {silo: torch.full((2,), size) for silo in NAMES}
    with pytest.raises(ConfigurationError, match="out of float32's range: lower learning_rate or set max_delta_norm"):
        run_rounds(optimizer, [deltas])


def test_an_empty_slab_changes_nothing() -> None:
    deltas = {silo: torch.ones(1) for silo in NAMES}
    cohort = weigh(summaries_of(deltas), weighting=EQUAL)
    model = torch.empty(0)
    aggregate_slab(model, in_order(deltas, slice(1, 1)), cohort, FED_AVG, {}, step_number=1)
    assert model.numel() == 0


@needs_gpu
@pytest.mark.parametrize("weighting", WEIGHTINGS, ids=lambda it: it.name)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_gpu_agrees_with_the_cpu(optimizer: ServerOptimizer, weighting: Weighting) -> None:
    rounds = [random_round(10_007, seed=70 + r) for r in range(3)]
    caps = WeightCaps(max_weight_share=0.4, max_delta_norm=5.0)
    on_cpu, _ = run_rounds(optimizer, rounds, weighting=weighting, caps=caps)
    on_gpu, _ = run_rounds(optimizer, rounds, weighting=weighting, caps=caps, device="cuda")
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-6, atol=1e-7)


@needs_gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("slab", [1_000, 4_097])
def test_slab_size_does_not_change_a_bit_on_the_gpu(optimizer: ServerOptimizer, slab: int) -> None:
    rounds = [random_round(10_007, seed=80 + r) for r in range(2)]
    whole, _ = run_rounds(optimizer, rounds, device="cuda")
    parts, _ = run_rounds(optimizer, rounds, slab=slab, device="cuda")
    assert parts.equal(whole)


@needs_gpu
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_poisoning_is_found_on_the_gpu(bad: float) -> None:
    deltas = random_round(5_000, seed=90)
    cohort = weigh(summaries_of(deltas), weighting=LORAR)
    deltas[NAMES[2]][4_999] = bad
    with pytest.raises(MalformedMessage, match="silo hospital"):
        aggregate_slab(
            torch.zeros(5_000, device="cuda"), in_order(deltas, device="cuda"), cohort, FED_AVG, {}, step_number=1
        )
