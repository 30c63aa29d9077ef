"""Adam without the noise in its second moment: by hand, beside float64, through a checkpoint, and what it refuses."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.checkpoint import CheckpointFile, TrainingIdentity, TrainingState
from silo_agent.training.local_optimizer import local_optimizer
from silo_agent.training.loss_log import LossLog
from silo_agent.training.private import private_trainer
from silo_agent.training.private.corrected_adam import CorrectedAdam
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.training import TrainingSection
from tests.unit.test_training_private_gradients import parameters_of, t5
from tests.unit.test_training_private_trainer import SCHEDULE, SECTION, examples_of, flat, loss_sum, train
from tests.unit.test_wire_plan import plan_value

CORRECTED = SECTION.model_copy(update={"optimizer": "adam_corrected"})


def stepped(
    gradients: Any, *, lr: float = 1.0, weight_decay: float = 0.0, noise: float = 1.0, floor: float = 0.1
) -> Any:
    """A parameter that began at 0, after a step with each row of `gradients`."""
    parameter = nn.Parameter(torch.zeros(len(gradients[0])))
    optimizer = CorrectedAdam([parameter], lr=lr, weight_decay=weight_decay, noise_deviation=noise, floor=floor)
    for row in gradients:
        parameter.grad = torch.tensor(row, dtype=torch.float32)
        optimizer.step()
    return parameter.detach().numpy()


def test_the_first_step_is_what_a_hand_computes() -> None:
    """Noise of deviation 3, gradients 5, -3 and 1: m / sqrt(m^2 - 9) is 5 / 4; the others are at the floor, 0.25 x 9 =
    1.5^2."""
    assert stepped([[5.0, -3.0, 1.0]], noise=3.0, floor=0.25) == pytest.approx([-5 / 4, 3 / 1.5, -1 / 1.5], rel=1e-6)


def test_the_second_step_has_means_without_the_bias_of_their_beginning() -> None:
    """Of 2 and 4: m = (0.09 x 2 + 0.1 x 4) / 0.19, v = (0.000999 x 4 + 0.001 x 16) / 0.001999, noise 1."""
    first, mean, square = 2 / 3**0.5, 0.58 / 0.19, 0.019996 / 0.001999
    assert stepped([[2.0], [4.0]]) == pytest.approx([-first - mean / (square - 1) ** 0.5], rel=1e-5)


def test_many_steps_are_those_of_a_float64_oracle() -> None:
    """As in the paper, in units of the gradient: v - s^2 beside the floor, s far from 1; rate and decay as AdamW has
    them."""
    generator = np.random.default_rng(3)
    noise, floor, lr, decay = 1e-4, 0.2, 0.02, 0.1
    signal = np.array([0.0, 1e-5, 1e-4, 1e-3, -1e-2] * 40)
    gradients = (signal + noise * generator.standard_normal((60, 200))).astype(np.float32)
    place, m, v = np.zeros(200), np.zeros(200), np.zeros(200)
    for step, gradient in enumerate(gradients.astype(np.float64), start=1):
        m, v = 0.9 * m + 0.1 * gradient, 0.999 * v + 0.001 * gradient**2
        under = np.maximum(v / (1 - 0.999**step) - noise**2, floor * noise**2)
        place = place - lr * decay * place - lr * (m / (1 - 0.9**step)) / np.sqrt(under)
    moved = stepped(gradients, lr=lr, weight_decay=decay, noise=noise, floor=floor)
    # Beside the floor v - s^2 cancels: what float32 rounds in v counts up to v / (floor s^2) times.
    assert np.abs(moved - place).max() < 2e-4 * np.abs(place).max()
    assert moved == pytest.approx(place, rel=2e-3, abs=1e-5)


def test_no_scale_of_gradients_leaves_float32() -> None:
    rows = np.random.default_rng(1).standard_normal((5, 30)) * 2
    plain = stepped(rows)
    for power in (-60, 60):
        assert np.array_equal(stepped(rows * 2.0**power, noise=2.0**power), plain)


def test_far_above_the_noise_it_is_adamw() -> None:
    rows = np.random.default_rng(2).standard_normal((20, 50)) + 5
    parameter = nn.Parameter(torch.zeros(50))
    adamw = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.1)
    for row in rows:
        parameter.grad = torch.tensor(row, dtype=torch.float32)
        adamw.step()
    moved = stepped(rows, lr=0.01, weight_decay=0.1, noise=1e-4)
    assert moved == pytest.approx(parameter.detach().numpy(), rel=1e-5)


def test_where_signal_is_below_the_noise_it_is_further_than_adamw() -> None:
    """The mean of squares is nearly all noise there, which AdamW divides by."""
    rows = 0.3 + np.random.default_rng(4).standard_normal((400, 2000))
    moved = stepped(rows, lr=0.01, floor=0.01)
    parameter = nn.Parameter(torch.zeros(2000))
    adamw = torch.optim.AdamW([parameter], lr=0.01, weight_decay=0.0)
    for row in rows:
        parameter.grad = torch.tensor(row, dtype=torch.float32)
        adamw.step()
    assert moved.mean() < 1.5 * float(parameter.detach().mean()) < 0


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["noise_deviation", "floor"])
def test_nothing_to_correct_for_and_no_floor_are_refused(name: str, value: float) -> None:
    numbers = {"noise_deviation": 1.0, "floor": 1.0, name: value}
    with pytest.raises(ValueError, match=rf"{name} is .* above 0"):
        CorrectedAdam([nn.Parameter(torch.zeros(1))], lr=1.0, weight_decay=0.0, **numbers)


def test_its_state_goes_through_a_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    rows = np.random.default_rng(5).standard_normal((8, 30)).astype(np.float32)

    def made(values: torch.Tensor) -> tuple[nn.Parameter, CorrectedAdam]:
        parameter = nn.Parameter(values.clone())
        return parameter, CorrectedAdam([parameter], lr=0.1, weight_decay=0.0, noise_deviation=0.5, floor=0.1)

    def go_on(parameter: nn.Parameter, optimizer: CorrectedAdam, some: Any) -> None:
        for row in some:
            parameter.grad = torch.tensor(row)
            optimizer.step()

    parameter, optimizer = made(torch.zeros(30))
    go_on(parameter, optimizer, rows[:5])
    digest = Digest("0" * 64)
    identity = TrainingIdentity(
        plan=digest,
        round=1,
        silo="a",
        model=digest,
        examples=digest,
        device="cpu",
        threads=1,
        torch="",
        transformers="",
    )
    file = CheckpointFile(tmp_path / "checkpoint", identity, update_bytes=0, notice=lambda event, detail: None)
    file.save(
        TrainingState(
            epochs=1,
            steps=5,
            seconds=0.0,
            log=LossLog.empty(1),
            parameters=[parameter],
            optimizer=optimizer.state_dict()["state"],
            random={},
        )
    )
    state = file.load(torch.device("cpu"))
    assert state is not None
    resumed, other = made(state.parameters[0])
    other.load_state_dict({**other.state_dict(), "state": state.optimizer})
    go_on(parameter, optimizer, rows[5:])
    go_on(resumed, other, rows[5:])
    assert torch.equal(resumed, parameter)


# --- in private training


def test_private_training_corrects_for_the_noise_of_a_mean_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """sigma x C / B of the plan, whatever the records are."""
    given: list[dict[str, float]] = []

    class Seen(CorrectedAdam):
        def __init__(self, parameters: Any, **numbers: float) -> None:
            given.append(numbers)
            super().__init__(parameters, **numbers)

    monkeypatch.setattr(private_trainer, "CorrectedAdam", Seen)
    schedule = replace(SCHEDULE, noise_multiplier=4.0, max_grad_norm=0.5, expected_batch_size=8)
    for count in (0, 30):
        train(t5(), examples_of(count), schedule, section=CORRECTED.model_copy(update={"variance_floor": 0.3}))
    assert given == 2 * [{"lr": 1e-2, "weight_decay": 0.0, "noise_deviation": 0.25, "floor": 0.3}]


def test_it_learns_where_noise_is_little() -> None:
    schedule = replace(SCHEDULE, sampling_rate=0.5, steps=25, noise_multiplier=0.01, expected_batch_size=6)
    model, examples = t5(), examples_of(12)
    before = loss_sum(model, examples, bound=8.0)
    train(model, examples, schedule, section=CORRECTED)
    assert loss_sum(model, examples, bound=8.0) < 0.8 * before


def test_training_without_noise_has_no_such_optimizer() -> None:
    with pytest.raises(ValueError, match=r"noise_deviation is 0\.0"):
        train(t5(), examples_of(4), replace(SCHEDULE, noise_multiplier=0.0), section=CORRECTED)
    with pytest.raises(ValueError, match="no noise to correct for"):
        local_optimizer(CORRECTED, parameters_of(t5()))


def test_it_moves_the_same_from_the_same_words_after_a_training_that_was_stopped() -> None:
    """A private training that is cut off begins anew: its optimizer does, too."""
    models = [t5(), t5()]
    train(models[0], examples_of(20), section=CORRECTED)
    with pytest.raises(TrainingStopped):
        train(t5(), examples_of(20), section=CORRECTED, should_stop=iter([False, False, True]).__next__)
    train(models[1], examples_of(20), section=CORRECTED)
    one, other = map(flat, models)
    assert torch.equal(one, other)
    assert not torch.equal(one, flat(t5()))


# --- in plans


def private_value(**training: Any) -> dict[str, Any]:
    return plan_value(
        training={"dropout": 0.0, **training},
        evaluation={"every": 0, "initial": False, "last": False},
        privacy={"level": "record", "noise_multiplier": 1.0},
    )


def test_a_plan_has_it_at_record_level_alone() -> None:
    assert Plan.model_validate(private_value(optimizer="adam_corrected")).training.variance_floor == 0.1
    for level in ("none", "silo"):
        value = {**private_value(optimizer="adam_corrected"), "privacy": {"level": level, "noise_multiplier": 1.0}}
        with pytest.raises(
            ValueError, match=rf'"adam_corrected" does not go with \[privacy\] level = "{level}".*"adamw"'
        ):
            Plan.model_validate(value)


@pytest.mark.parametrize("floor", [0.0, -0.1, float("inf"), float("nan"), 1e-7])
def test_a_floor_that_is_not_above_zero_is_refused_by_name(floor: float) -> None:
    with pytest.raises(ValueError, match="variance_floor"):
        Plan.model_validate(private_value(optimizer="adam_corrected", variance_floor=floor))
    with pytest.raises(ValueError, match="variance_floor"):
        TrainingSection(variance_floor=floor)


def test_it_costs_what_adamw_costs() -> None:
    """Nothing of the ledger's entries follows from the optimizer."""
    plans = [Plan.model_validate(private_value(optimizer=optimizer)) for optimizer in ("adamw", "adam_corrected")]
    for one, other in pairwise(plans):
        assert one.releases_of_round == other.releases_of_round
        assert one.digest != other.digest
