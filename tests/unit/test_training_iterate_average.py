"""The average of a private round's iterates: by hand, beside float64, nothing else of the training differs, and what is
refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.private import private_trainer
from silo_agent.training.private.iterate_average import IterateAverage
from silo_agent.training.private.loss_sums import GRID
from silo_agent.training.private.private_optimizer import PrivateOptimizer
from silo_agent.training.private.private_trainer import schedule_of
from silo_wire.plans.plan import Plan
from tests.unit.test_training_private_gradients import t5
from tests.unit.test_training_private_trainer import SCHEDULE, examples_of, flat, loss_sum, train
from tests.unit.test_wire_plan import plan_value

STEPS = 12
PLAIN = replace(SCHEDULE, steps=STEPS)
AVERAGED = replace(PLAIN, average_decay=0.9999)


def averaged(iterates: Any, decay: float) -> Any:
    parameter = nn.Parameter(torch.tensor(iterates[0], dtype=torch.float32))
    average = IterateAverage([parameter], decay)
    for iterate in iterates[1:]:
        with torch.no_grad():
            parameter.copy_(torch.tensor(iterate, dtype=torch.float32))
        average.take()
    average.give()
    return parameter.detach().numpy()


def test_two_iterates_are_averaged_as_by_hand() -> None:
    """From 0 to 1 and 2: 0.1 x 0 + 0.9 x 1 = 0.9, then 2/11 x 0.9 + 9/11 x 2 = 1.8. A decay of 0.15: 0.15 x 0.9 + 0.85
    x 2."""
    assert averaged([[0.0], [1.0], [2.0]], 0.9999) == pytest.approx([1.8])
    assert averaged([[0.0], [1.0], [2.0]], 0.15) == pytest.approx([1.835])
    assert averaged([[3.0], [3.0], [3.0]], 0.5) == pytest.approx([3.0])


def test_many_iterates_are_averaged_as_by_a_float64_oracle() -> None:
    iterates = np.random.default_rng(1).standard_normal((200, 50)).astype(np.float32)
    for decay in (0.5, 0.9, 0.9999):
        mean = iterates[0].astype(np.float64)
        for t, iterate in enumerate(iterates[1:].astype(np.float64)):
            stays = min(decay, (1 + t) / (10 + t))
            mean = stays * mean + (1 - stays) * iterate
        assert averaged(iterates, decay) == pytest.approx(mean, rel=1e-5, abs=1e-6)


# --- in private training


@dataclass
class Seen:
    """Of one training: what was drawn, each noised gradient, each iterate, and the sums of losses that the weight is
    made of."""

    drawn: list[list[int]] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)
    iterates: list[torch.Tensor] = field(default_factory=list)
    sums: list[tuple[int, int]] = field(default_factory=list)


@contextmanager
def seen() -> Iterator[Seen]:
    it = Seen()
    sample, reduction, step = private_trainer.drawn_examples, private_trainer.noised_reduction, PrivateOptimizer.step

    def drawn_examples(*arguments: Any) -> list[int]:
        it.drawn.append(sample(*arguments))
        return it.drawn[-1]

    def noised_reduction(before: int, after: int, **named: Any) -> float:
        it.sums.append((before, after))
        return reduction(before, after, **named)

    def stepped(optimizer: Any, *arguments: Any) -> Any:
        answer = step(optimizer, *arguments)
        it.gradients.append(torch.cat([parameter.grad.flatten().clone() for parameter in optimizer.params]))
        it.iterates.append(torch.cat([parameter.detach().flatten().clone() for parameter in optimizer.params]))
        return answer

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(private_trainer, "drawn_examples", drawn_examples)
        patched.setattr(private_trainer, "noised_reduction", noised_reduction)
        patched.setattr(PrivateOptimizer, "step", stepped)
        yield it


def test_draws_noised_gradients_and_iterates_are_bit_for_bit_the_same_with_and_without() -> None:
    examples, of = examples_of(30), []
    for schedule in (PLAIN, AVERAGED):
        with seen() as it:
            train(t5(), examples, schedule)
        of.append(it)
    assert of[0].drawn == of[1].drawn
    assert len(of[0].drawn) == len(of[0].gradients) == STEPS  # no record is drawn once more
    for name in ("gradients", "iterates"):
        for one, other in zip(getattr(of[0], name), getattr(of[1], name), strict=True):
            assert torch.equal(one, other)


def test_a_round_ends_with_the_average_and_weighs_what_that_reduces() -> None:
    model, examples = t5(), examples_of(30)
    mean = flat(model).double()
    with seen() as it:
        weight = train(model, examples, AVERAGED)
    for t, iterate in enumerate(it.iterates):
        stays = (1 + t) / (10 + t)
        mean = stays * mean + (1 - stays) * iterate.double()
    assert torch.allclose(flat(model).double(), mean, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(flat(model), it.iterates[-1], rtol=1e-3)
    assert it.sums == [(loss_sum(t5(), examples, bound=8.0), loss_sum(model, examples, bound=8.0))]
    assert weight is not None
    assert 0 <= weight <= max(0, it.sums[0][0] - it.sums[0][1]) * 8.0 / GRID + 8 * 16.0


def test_the_average_is_nearer_to_where_the_iterates_go_than_the_last_of_them() -> None:
    """Steps about one place, which noise throws about."""
    generator = np.random.default_rng(2)
    place = np.zeros((200, 1000))
    for step in range(1, 200):
        place[step] = 0.9 * place[step - 1] + generator.standard_normal(1000)
    assert np.square(averaged(place, 0.9999)).mean() < 0.7 * np.square(place[-1]).mean()


def test_a_training_that_was_cut_off_leaves_nothing_in_the_next_ones_average() -> None:
    """It begins anew, from the round model: with the same words to the same bits."""
    models = [t5(), t5()]
    train(models[0], examples_of(30), AVERAGED)
    with pytest.raises(TrainingStopped):
        train(t5(), examples_of(30), AVERAGED, should_stop=iter([False, False, False, True]).__next__)
    train(models[1], examples_of(30), AVERAGED)
    assert torch.equal(*map(flat, models))


# --- in plans


def private(**privacy: Any) -> dict[str, Any]:
    return plan_value(
        training={"dropout": 0.0},
        evaluation={"every": 0, "initial": False, "last": False},
        privacy={"level": "record", "noise_multiplier": 1.0, **privacy},
    )


def test_ledger_entries_and_cost_are_the_same_with_and_without() -> None:
    plain, other = Plan.model_validate(private()), Plan.model_validate(private(average_decay=0.9999))
    assert schedule_of(other, other.training).average_decay == 0.9999
    assert schedule_of(plain, plain.training).average_decay == 0.0
    assert plain.releases_of_round == other.releases_of_round
    assert plain.privacy.epsilon(rounds=5, weighted=True) == other.privacy.epsilon(rounds=5, weighted=True)
    assert plain.digest != other.digest


@pytest.mark.parametrize("level", ["none", "silo"])
def test_iterates_without_noise_are_not_averaged(level: str) -> None:
    with pytest.raises(ValueError, match=rf'average_decay = 0\.9 does not go with level = "{level}".*set it to 0'):
        Plan.model_validate(private(level=level, average_decay=0.9))


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan"), float("inf")])
def test_a_decay_that_is_none_is_refused_by_name(decay: float) -> None:
    with pytest.raises(ValueError, match="average_decay"):
        Plan.model_validate(private(average_decay=decay))
