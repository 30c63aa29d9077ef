"""One round of local training, with numbers worked by hand and with other implementations as the yardstick."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_t5 import random_model, vocabulary_size
from transformers import T5ForConditionalGeneration

from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.training import local_trainer
from silo_agent.training.data.batches import EncodedExamples, collate, shuffled_batches, sorted_batches
from silo_agent.training.device import computed_again
from silo_agent.training.local_optimizer import learning_rate_factor, local_optimizer
from silo_agent.training.local_trainer import accumulate_gradient, train_locally
from silo_agent.training.task_loss import summed_loss
from silo_wire.messages import TrainingSummary
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.work import epochs_begun, optimizer_steps


def encoded(count: int = 7, seed: int = 0) -> EncodedExamples:
    """Random token ids; lengths differ, so that token means and means of means differ."""
    generator = torch.Generator().manual_seed(seed)

    def rows(least: int, most: int) -> tuple[np.ndarray, ...]:
        lengths = torch.randint(least, most, (count,), generator=generator).tolist()
        return tuple(
            np.append(torch.randint(3, vocabulary_size(), (n,), generator=generator).numpy(), 1).astype(np.int32)
            for n in lengths
        )

    return EncodedExamples(inputs=rows(3, 9), targets=rows(1, 12), inputs_cut=0, targets_cut=0, targets_with_unknown=0)


def section(**changes: Any) -> TrainingSection:
    return TrainingSection.model_validate({"batch_size": 2, "dropout": 0.0, "learning_rate": 1e-2, **changes})


def train(
    model: T5ForConditionalGeneration,
    examples: EncodedExamples,
    plan: TrainingSection,
    *,
    seed: int = 1,
    origin: Sequence[torch.Tensor] | None = None,
    seen: list[tuple[float, float]] | None = None,
    sample: Sequence[int] | None = None,
) -> TrainingSummary:
    return train_locally(
        model,
        list(model.parameters()),
        examples,
        plan,
        seed=seed,
        sample=sample,
        round_parameters=origin,
        checkpoint=None,
        on_progress=lambda fraction, loss: None if seen is None else seen.append((fraction, loss)),
        should_stop=lambda: False,
        clock=lambda: 0.0,
    )


def flat(model: T5ForConditionalGeneration) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def model() -> T5ForConditionalGeneration:
    return random_model(dropout_rate=0.0)


def test_training_lowers_the_loss_and_reports_what_it_did() -> None:
    seen: list[tuple[float, float]] = []
    summary = train(model(), encoded(), section(epochs=5), seen=seen)
    assert summary.examples == 7
    assert summary.optimizer_steps == 5 * 4
    assert [fraction for fraction, _ in seen] == [step / 20 for step in range(1, 21)]
    losses = [loss for _, loss in seen]
    assert (summary.loss_first, summary.loss_last) == (losses[0], losses[-1])
    assert (summary.loss_max, summary.loss_min) == (max(losses), min(losses))
    assert summary.loss_last < summary.loss_first


def test_same_seed_same_bytes_other_seed_other_bytes() -> None:
    """Dropout is on: its masks follow the seed too, and the process's own random state is neither used nor moved."""
    results = []
    for seed in (1, 1, 2):
        trained = random_model(dropout_rate=0.2)
        torch.manual_seed(len(results))
        state = torch.get_rng_state()
        train(trained, encoded(), section(epochs=2, optimizer="adafactor"), seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        results.append(flat(trained))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_accumulation_equals_one_large_batch() -> None:
    """Token-mean over the effective batch: 3 batches of 2 make the very step of 1 batch of 6, lengths
    notwithstanding."""
    accumulated, at_once = model(), model()
    first = train(accumulated, encoded(6), section(gradient_accumulation=3, max_grad_norm=0.0))
    second = train(at_once, encoded(6), section(batch_size=6, max_grad_norm=0.0))
    assert first.optimizer_steps == second.optimizer_steps == 1
    assert first.loss_first == pytest.approx(second.loss_first, rel=1e-6)
    # AdamW's first step hides magnitudes: compare the gradients themselves.
    gradients = []
    for size, group in ((2, [[0, 1], [2, 3], [4, 5]]), (6, [[0, 1, 2, 3, 4, 5]])):
        fresh = model()
        accumulate_gradient(fresh, encoded(6), group, section(batch_size=size), torch.device("cpu"), lambda: False)
        gradients.append(torch.cat([p.grad.reshape(-1) for p in fresh.parameters() if p.grad is not None]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-7)


def test_what_is_left_of_an_effective_batch_is_neither_dropped_nor_inflated() -> None:
    """7 examples in batches of 2, 3 to an effective batch: steps over 3 and 1 batches; each loss is a plain token
    mean."""
    seen: list[tuple[float, float]] = []
    start = model()
    summary = train(model(), encoded(), section(gradient_accumulation=3, learning_rate=1e-7), seen=seen)
    assert summary.optimizer_steps == 2
    order = shuffled_batches(encoded(), batch_size=2, generator=torch.Generator().manual_seed(1))
    for (_, loss), group in zip(seen, (order[:3], order[3:]), strict=True):
        indices = [index for batch in group for index in batch]
        batch = collate(encoded(), indices, pad=0, device=torch.device("cpu"))
        expected = start(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_the_summarys_loss_reduction_follows_loss_log_steps() -> None:
    """Six steps: the first by itself, then one window that ends with the sixth."""
    seen: list[tuple[float, float]] = []
    summary = train(model(), encoded(6), section(epochs=3, batch_size=3, loss_log_steps=6), seen=seen)
    assert summary.optimizer_steps == 6
    assert summary.loss_first == seen[0][1]
    later = [loss for _, loss in seen[1:]]
    assert min(later) < summary.loss_last < max(later)
    assert summary.loss_reduction == abs(summary.loss_first - summary.loss_last)


@pytest.mark.parametrize(("step", "factor"), [(0, 1.0), (1, 0.75), (3, 0.25), (4, 0.0)])
def test_linear_decay_reaches_zero_after_the_last_step(step: int, factor: float) -> None:
    assert learning_rate_factor("linear", step, 4) == factor
    assert learning_rate_factor("constant", step, 4) == 1.0


def test_the_schedule_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    original = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    train(model(), encoded(8), section(learning_rate_schedule="linear", learning_rate=0.4))
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])


def test_adafactor_makes_the_reference_updates() -> None:
    """Shazeer and Stern 2018, Algorithms 4 and 5 with a fixed step size, worked in float64 for a matrix and a
    vector."""
    lr, steps = 0.05, 4
    generator = torch.Generator().manual_seed(3)
    matrix, vector = (torch.randn(shape, generator=generator) for shape in ((4, 3), (5,)))
    parameters = [torch.nn.Parameter(matrix.clone()), torch.nn.Parameter(vector.clone())]
    optimizer = local_optimizer(section(optimizer="adafactor", learning_rate=lr), parameters)
    expected = [matrix.double().numpy(), vector.double().numpy()]
    rows, columns, squares = np.zeros(4), np.zeros(3), np.zeros(5)
    for step in range(1, steps + 1):
        gradients = [torch.randn(p.shape, generator=generator) for p in parameters]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        beta2 = 1 - step**-0.8
        g = gradients[0].double().numpy()
        rows = beta2 * rows + (1 - beta2) * (g**2 + 1e-30).mean(axis=1)
        columns = beta2 * columns + (1 - beta2) * (g**2 + 1e-30).mean(axis=0)
        u = g / np.sqrt(np.outer(rows, columns) / rows.mean())
        expected[0] = expected[0] - lr * u / max(1.0, math.sqrt((u**2).mean()))
        g = gradients[1].double().numpy()
        squares = beta2 * squares + (1 - beta2) * (g**2 + 1e-30)
        u = g / np.sqrt(squares)
        expected[1] = expected[1] - lr * u / max(1.0, math.sqrt((u**2).mean()))
    for parameter, reference in zip(parameters, expected, strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), reference, rtol=1e-4, atol=1e-6)


def test_fedprox_pulls_towards_the_round_model_and_is_in_no_logged_loss() -> None:
    far = [p.detach() + 1.0 for p in model().parameters()]
    free, held = model(), model()
    seen_free: list[tuple[float, float]] = []
    seen_held: list[tuple[float, float]] = []
    train(free, encoded(2), section(), seen=seen_free)
    train(held, encoded(2), section(fedprox_mu=100.0), origin=far, seen=seen_held)
    assert seen_free == seen_held  # the first step's task loss is the same, whatever mu
    target = torch.cat([tensor.reshape(-1) for tensor in far])
    start = flat(model())
    assert (flat(held) - target).norm() < (start - target).norm() < (flat(free) - target).norm() * 1.01
    # AdamW's first step is lr times the gradient's sign; with mu this large that is the direction of the round model.
    torch.testing.assert_close(flat(held) - start, torch.full_like(start, 1e-2), rtol=1e-2, atol=1e-4)


def test_fedprox_at_the_round_model_itself_changes_nothing() -> None:
    free, held = model(), model()
    train(free, encoded(2), section())
    train(held, encoded(2), section(fedprox_mu=0.1), origin=[p.detach().clone() for p in held.parameters()])
    assert torch.equal(flat(free), flat(held))


def test_the_gradient_is_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: list[float] = []
    original = torch.optim.AdamW.step

    def spy(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        norms.append(float(torch.cat([g.reshape(-1) for g in gradients]).norm()))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    train(model(), encoded(2), section(max_grad_norm=0.01))
    train(model(), encoded(2), section(max_grad_norm=0.0))
    assert norms[0] == pytest.approx(0.01, rel=1e-3)
    assert norms[1] > 0.1


def test_cancellation_is_heard_within_an_effective_batch() -> None:
    asked = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(TrainingStopped):
        train_locally(
            model(),
            list(model().parameters()),
            encoded(8),
            section(gradient_accumulation=4),
            seed=1,
            sample=None,
            round_parameters=None,
            checkpoint=None,
            on_progress=lambda fraction, loss: pytest.fail("no step may complete"),
            should_stop=stop,
            clock=lambda: 0.0,
        )


def test_a_loss_that_is_not_finite_is_refused_with_the_step_and_the_remedy() -> None:
    broken = model()
    with torch.no_grad():
        broken.shared.weight.fill_(math.nan)
    with pytest.raises(TrainingDiverged, match=r"loss is nan at optimizer step 1 of 4: lower learning_rate \(0.01\)"):
        train(broken, encoded(), section())


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    broken = model()
    broken.shared.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(TrainingDiverged, match="gradient norm is"):
        train(broken, encoded(), section())


def test_a_learning_rate_that_blows_up_ends_in_a_refusal_not_in_nan() -> None:
    with pytest.raises(TrainingDiverged):
        train(model(), encoded(), section(learning_rate=10.0, weight_decay=1e30, epochs=10, max_grad_norm=0.0))


def test_bfloat16_keeps_float32_parameters_and_a_similar_loss() -> None:
    narrow, wide = model(), model()
    ours = train(narrow, encoded(4), section(batch_size=4, precision="bfloat16"))
    theirs = train(wide, encoded(4), section(batch_size=4))
    assert {p.dtype for p in narrow.parameters()} == {torch.float32}
    assert ours.loss_first == pytest.approx(theirs.loss_first, rel=0.02)
    assert ours.loss_first != theirs.loss_first


def test_batches_hold_every_example_once_in_another_order_each_epoch() -> None:
    examples, generator = encoded(103), torch.Generator().manual_seed(0)
    first, second = (shuffled_batches(examples, batch_size=4, generator=generator) for _ in range(2))
    for batches in (first, second):
        assert sorted(index for batch in batches for index in batch) == list(range(103))
        assert [len(batch) for batch in batches] == [4] * 25 + [3]
    assert first != second


def test_batches_mix_lengths_so_that_one_template_does_not_fill_a_batch() -> None:
    examples = encoded(103)
    batches = shuffled_batches(examples, batch_size=32, generator=torch.Generator().manual_seed(0))
    means = [sum(len(examples.targets[i]) for i in batch) / len(batch) for batch in batches]
    everything = [len(target) for target in examples.targets]
    assert max(means) - min(means) < (max(everything) - min(everything)) / 2


def test_batches_of_similar_lengths_hold_every_example_once_with_less_padding() -> None:
    examples, generator = encoded(103), torch.Generator().manual_seed(0)

    def padding(batches: list[list[int]]) -> int:
        lengths = [[len(examples.targets[index]) for index in batch] for batch in batches]
        return sum(len(batch) * max(batch) - sum(batch) for batch in lengths)

    mixed = shuffled_batches(examples, batch_size=4, generator=generator)
    first, second = (shuffled_batches(examples, batch_size=4, generator=generator, grouped=8) for _ in range(2))
    for batches in (first, second):
        assert sorted(index for batch in batches for index in batch) == list(range(103))
        assert sorted(map(len, batches)) == [3] + [4] * 25
    assert first != second
    assert 2 * padding(first) < padding(mixed)
    longest = [max(len(examples.targets[index]) for index in batch) for batch in first[:8]]
    assert longest != sorted(longest, reverse=True), "in random order, not longest first"


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_layers_that_are_computed_again_have_the_same_gradients(dropout: float) -> None:
    """To rounding, with the same dropout; and less is kept for the way back."""
    kept, gradients = [], []
    for again in (False, True):
        trained, held = random_model(num_layers=4, dropout_rate=dropout).train(), 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal held
            held += tensor.numel()
            return tensor

        with computed_again(trained, wanted=again), torch.random.fork_rng():
            torch.manual_seed(1)
            batch = collate(encoded(), range(7), pad=0, device=torch.device("cpu"))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = summed_loss(trained, batch)
            loss.backward()  # type: ignore[no-untyped-call]
        assert not trained.is_gradient_checkpointing
        kept.append(held)
        gradients.append(torch.cat([one.grad.flatten() for one in trained.parameters() if one.grad is not None]))
    assert float((gradients[0] - gradients[1]).norm()) < 1e-6 * float(gradients[0].norm())
    assert kept[1] < kept[0] / 4


def test_a_plan_has_layers_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def seen(model: Any, *, wanted: bool) -> Any:
        asked.append(wanted)
        return computed_again(model, wanted=wanted)

    monkeypatch.setattr(local_trainer, "computed_again", seen)
    for wanted in (False, True):
        train(model(), encoded(), section(gradient_checkpointing=wanted))
    assert asked == [False, True]


def test_fused_optimizers_step_as_plain_ones_do() -> None:
    """AdamW and SGD are always fused: one pass over the parameters in place of one for each operation."""
    for optimizer, plain in (("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
        one, other = (torch.nn.Parameter(torch.linspace(-1.0, 1.0, 1000)) for _ in range(2))
        plan = section(optimizer=optimizer, learning_rate=0.1, weight_decay=0.01)
        fused, unfused = local_optimizer(plan, [one]), plain([other], lr=0.1, weight_decay=0.01, fused=False)
        assert fused.defaults["fused"]
        for step in range(5):
            one.grad = torch.sin(torch.arange(1000.0) + step)
            other.grad = one.grad.clone()
            fused.step()
            unfused.step()
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_evaluation_batches_come_longest_first() -> None:
    examples = encoded(20)
    batches = list(sorted_batches(examples, chosen=range(5, 20), batch_size=4))
    assert sorted(index for batch in batches for index in batch) == list(range(5, 20))
    lengths = [len(examples.targets[index]) for batch in batches for index in batch]
    assert lengths == sorted(lengths, reverse=True)


# --- plain SGD, and steps in place of epochs


def test_by_hand_a_step_of_sgd_is_the_clipped_gradient_times_the_rate() -> None:
    for clip in (0.0, 0.5):
        fresh, stepped = model(), model()
        accumulate_gradient(fresh, encoded(2), [[0, 1]], section(), torch.device("cpu"), lambda: False)
        gradient = torch.cat([parameter.grad.reshape(-1) for parameter in fresh.parameters()])  # type: ignore[union-attr]
        factor = min(1.0, clip / float(gradient.norm())) if clip else 1.0
        assert clip == 0.0 or factor < 1.0, "nothing would be clipped"
        train(stepped, encoded(2), section(optimizer="sgd", learning_rate=0.1, max_grad_norm=clip))
        expected = flat(fresh) - 0.1 * factor * gradient
        torch.testing.assert_close(flat(stepped), expected, rtol=1e-5, atol=1e-7)


def test_sgd_decays_by_rate_times_decay_as_adamw_does() -> None:
    plain, decayed = model(), model()
    settings = {"optimizer": "sgd", "learning_rate": 0.1}
    train(plain, encoded(2), section(**settings))
    train(decayed, encoded(2), section(**settings, weight_decay=0.5))
    torch.testing.assert_close(flat(decayed), flat(plain) - 0.1 * 0.5 * flat(model()), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("steps", "begun"), [(1, 1), (3, 1), (4, 1), (5, 2), (9, 3)])
def test_a_silo_makes_the_plans_steps_whatever_it_has(steps: int, begun: int) -> None:
    """7 examples in batches of 2 are 4 steps an epoch."""
    plan = section(optimizer="sgd", steps=steps)
    seen: list[tuple[float, float]] = []
    summary = train(model(), encoded(), plan, seen=seen)
    assert summary.optimizer_steps == optimizer_steps(7, plan) == len(seen) == steps
    assert seen[-1][0] == 1.0
    assert epochs_begun(7, plan) == begun


def test_whole_epochs_of_steps_are_epochs() -> None:
    by_epochs, by_steps = model(), model()
    train(by_epochs, encoded(), section(epochs=2))
    train(by_steps, encoded(), section(steps=8))
    assert torch.equal(flat(by_epochs), flat(by_steps))
