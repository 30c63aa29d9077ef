"""What a round's loss fell by, measured in each of the ways that a plan may name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_t5 import CORPUS, bundle_of, random_model, silo_data, vocabulary_size, write_model
from transformers import T5ForConditionalGeneration

from lorica_coordinator.aggregation.weighting import SiloSummary, weigh
from lorica_coordinator.plans.presets import preset
from lorica_security.errors import DataError
from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.training import silo_trainer
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.device import DeviceSettings
from silo_agent.training.local_trainer import train_locally
from silo_agent.training.loss_log import LEAST_LOSSES, LossLog, logged_losses, require_losses
from silo_agent.training.loss_reduction import MOST_EXAMPLES, drawn_sample, sample_loss
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.update.masked_vector import own_weight
from silo_wire.messages import TrainingSummary
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.weightings.lorar import LORAR
from tests.support.federation_peer import small_bundle

SILO = "clinic"


def encoded(count: int, seed: int = 0) -> EncodedExamples:
    """Random token ids; lengths differ, so that token means and means of means differ."""
    generator = torch.Generator().manual_seed(seed)

    def rows(least: int, most: int) -> tuple[np.ndarray, ...]:
        lengths = torch.randint(least, most, (count,), generator=generator).tolist()
        return tuple(
            np.append(torch.randint(3, vocabulary_size(), (n,), generator=generator).numpy(), 1).astype(np.int32)
            for n in lengths
        )

    return EncodedExamples(inputs=rows(3, 9), targets=rows(1, 12), inputs_cut=0, targets_cut=0, targets_with_unknown=0)


def copies(examples: EncodedExamples, count: int) -> EncodedExamples:
    """So many examples, of which each is one of `examples`, all of them equally often."""
    times = -(-count // len(examples))
    return replace(examples, inputs=(examples.inputs * times)[:count], targets=(examples.targets * times)[:count])


def section(**changes: Any) -> TrainingSection:
    return TrainingSection.model_validate({"batch_size": 4, "dropout": 0.0, "learning_rate": 1e-2, **changes})


def model(dropout: float = 0.0) -> T5ForConditionalGeneration:
    return random_model(dropout_rate=dropout)


def train(
    trained: T5ForConditionalGeneration, examples: EncodedExamples, plan: TrainingSection, sample: list[int] | None
) -> TrainingSummary:
    return train_locally(
        trained,
        list(trained.parameters()),
        examples,
        plan,
        seed=1,
        sample=sample,
        round_parameters=None,
        checkpoint=None,
        on_progress=lambda fraction, loss: None,
        should_stop=lambda: False,
        clock=lambda: 0.0,
    )


def loss_of(of: T5ForConditionalGeneration, examples: EncodedExamples, sample: list[int]) -> float:
    return sample_loss(of, examples, sample, section(), should_stop=lambda: False)


def one_by_one(of: T5ForConditionalGeneration, examples: EncodedExamples, sample: list[int]) -> float:
    """The same as the Transformers library has it, an example at a time and without padding."""
    of.eval()
    losses = []
    for index in sample:
        ids, labels = (
            torch.tensor(tokens[index][None], dtype=torch.long) for tokens in (examples.inputs, examples.targets)
        )
        with torch.inference_mode():
            losses.append(float(of(input_ids=ids, labels=labels).loss))
    return sum(losses) / len(losses)


# ---- evaluated ------------------------------------------------------------------------------------------------------


def test_the_loss_of_a_sample_is_the_mean_over_its_examples_of_their_own_token_means() -> None:
    examples, sample = encoded(11), [0, 3, 4, 7, 9, 10]
    ours = loss_of(model(), examples, sample)
    assert ours == pytest.approx(one_by_one(model(), examples, sample), rel=1e-5)
    tokens = sum(len(examples.targets[index]) for index in sample)
    by_token = sum(one_by_one(model(), examples, [index]) * len(examples.targets[index]) for index in sample) / tokens
    assert ours != pytest.approx(by_token, rel=1e-5), "no example counts more for a longer query"


def test_it_is_without_dropout_and_leaves_the_model_and_the_random_state_as_they_were() -> None:
    examples, of = encoded(9), model(dropout=0.5).train()
    expected = loss_of(model(), examples, list(range(9)))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    assert loss_of(of, examples, list(range(9))) == expected
    assert of.training
    assert torch.equal(torch.get_rng_state(), state)
    assert loss_of(of.eval(), examples, [1]) != 0.0
    assert not of.training


def test_a_round_is_told_the_loss_of_its_sample_before_and_after() -> None:
    examples, sample, trained = encoded(9), [1, 2, 5, 8], model(dropout=0.2)
    summary = train(trained, examples, section(epochs=3, dropout=0.2), sample)
    assert summary.loss_first == loss_of(model(), examples, sample)
    assert summary.loss_last == loss_of(trained, examples, sample)
    assert 0.0 < summary.loss_reduction == summary.loss_first - summary.loss_last
    assert summary.optimizer_steps == 9


def test_whether_losses_are_evaluated_or_logged_changes_no_bit_of_training() -> None:
    evaluated, logged = model(dropout=0.2), model(dropout=0.2)
    train(evaluated, encoded(9), section(epochs=2, dropout=0.2), list(range(9)))
    train(logged, encoded(9), section(epochs=2, dropout=0.2, loss_reduction="logged"), None)
    assert all(torch.equal(one, other) for one, other in zip(evaluated.parameters(), logged.parameters(), strict=True))


def test_a_loss_that_rose_reduces_nothing() -> None:
    summary = train(model(), encoded(9), section(learning_rate=3.0, max_grad_norm=0.0), list(range(9)))
    assert summary.loss_last > summary.loss_first
    assert summary.loss_reduction == 0.0


def test_a_loss_that_is_not_finite_is_refused_with_the_remedy() -> None:
    broken = model()
    with torch.no_grad():
        broken.shared.weight.fill_(float("nan"))
    with pytest.raises(TrainingDiverged, match=r"of 3 examples in evaluation is nan: lower learning_rate \(0.01\)"):
        loss_of(broken, encoded(3), [0, 1, 2])


def test_whoever_asks_to_stop_is_heard_before_each_batch() -> None:
    answers = iter([False, False, True])
    with pytest.raises(TrainingStopped):
        sample_loss(model(), encoded(12), list(range(12)), section(), should_stop=lambda: next(answers))


@given(examples=st.integers(1, 5_000), seed=st.integers(0, 2**63 - 1) | st.binary(min_size=32, max_size=32))
def test_a_sample_is_of_different_examples_and_of_all_where_they_are_few(examples: int, seed: int | bytes) -> None:
    sample = drawn_sample(examples, seed)
    assert len(set(sample)) == len(sample) == min(examples, MOST_EXAMPLES)
    assert set(sample) <= set(range(examples))
    assert sample == drawn_sample(examples, seed)


def test_a_large_silos_sample_is_of_its_seed() -> None:
    samples = {tuple(drawn_sample(1000, seed)) for seed in range(4)}
    assert len(samples) == 4
    first = drawn_sample(1000, 0)
    assert min(first) < 100 < 900 <= max(first), "not the first ones of the file"


# ---- weights in proportion to |D_i| ---------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(5, 5_000), min_size=2, max_size=6),
    fall=st.floats(0.01, 10.0),
    batch=st.integers(1, 64),
    epochs=st.integers(1, 12),
)
def test_with_equal_falls_weights_are_in_proportion_to_examples_whatever_the_steps(
    sizes: list[int], fall: float, batch: int, epochs: int
) -> None:
    """Each example's loss falls by as much at every silo; steps are from 1 to 60,000."""

    def told(number: int, examples: int) -> SiloSummary:
        sample = drawn_sample(examples, number)
        return SiloSummary(
            silo=f"silo-{number}",
            examples=examples,
            loss_reduction=sum(fall for _ in sample) / len(sample),
            optimizer_steps=epochs * -(-examples // batch),
            delta_norm=1.0,
        )

    weights = weigh([told(number, examples) for number, examples in enumerate(sizes)], weighting=LORAR)
    for silo, examples in zip(weights.silos, sizes, strict=True):
        assert silo.share == pytest.approx(examples / sum(sizes), rel=1e-9)


def test_silos_of_the_same_examples_have_the_same_reduction_however_many_they_are_and_however_they_log() -> None:
    """Between the same two models. Losses that are logged in windows of four tell the smallest silo that nothing
    fell."""
    few = encoded(4)
    before, after = model(), model()
    train(after, few, section(epochs=8), None)
    falls = []
    for count in (4, 32, 400):
        examples = copies(few, count)
        sample = drawn_sample(count, 7)
        falls.append(loss_of(before, examples, sample) - loss_of(after, examples, sample))
    assert falls[0] > 0.1
    assert falls[1] == pytest.approx(falls[0], rel=1e-5)
    assert falls[2] == pytest.approx(falls[0], rel=0.1), "256 of 400: not all of the four equally often"


@pytest.mark.parametrize("examples", [5, 32, 100])
def test_a_small_silo_has_a_weight_under_the_preset_default(examples: int) -> None:
    """Two epochs of 16 examples are at most four steps at 32 examples; whose reduction was 0 by windows of four."""
    plan = TrainingSection.model_validate(preset("default")["training"])
    assert (plan.epochs, plan.batch_size, plan.loss_reduction) == (2, 16, "evaluated")
    data, trained = encoded(examples), model()
    summary = train(trained, data, plan, drawn_sample(examples, 1))
    expected = one_by_one(model(), data, list(range(examples))) - one_by_one(trained, data, list(range(examples)))
    assert summary.loss_reduction == pytest.approx(expected, rel=1e-4)
    assert LORAR.raw_weight(summary) > 0.0


# ---- at a silo -----------------------------------------------------------------------------------------------------


class Silo:
    """A plan at one silo, and what its trainings were given as their samples."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, examples: int, **sections: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.samples = folder, list[list[int] | None]()
        made = random_model()
        training = {"epochs": 1, "batch_size": 128, "max_output_tokens": 16, "max_input_tokens": 16}
        self.bundle = bundle_of(made, **{"training": training, **sections})
        self.manifest = write_model(made, folder / "model")
        self.data = silo_data([(CORPUS[n % 3], CORPUS[3 + n % 3]) for n in range(examples)])

        def trained(*given: Any, **named: Any) -> TrainingSummary:
            self.samples.append(named["sample"])
            return TrainingSummary(
                examples=1, loss_max=1, loss_min=0, loss_first=1, loss_last=0, optimizer_steps=1, seconds=0
            )

        patch.setattr(silo_trainer, "train_locally", trained)

    def sampled(self, round_number: int, entropy: bytes = bytes(32), silo: str = SILO) -> list[int] | None:
        trainer = SiloTrainer(self.bundle, self.data, silo, DeviceSettings(device="cpu"), own_entropy=entropy)
        trainer.train(
            round_number=round_number,
            model_path=self.folder / "model",
            model=self.manifest,
            update_path=self.folder / "update",
        )
        return self.samples[-1]


MASKED = {"aggregation": {"secure_aggregation": True, "max_weight": 100.0}, "schedule": {"rounds": 3, "min_silos": 3}}


def test_a_round_has_a_sample_of_its_own_which_is_the_same_when_it_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo = Silo(tmp_path, monkeypatch, 300)
    first = silo.sampled(1)
    assert first is not None
    assert len(first) == MOST_EXAMPLES
    assert silo.sampled(1) == first
    assert silo.sampled(1, bytes([1]) * 32) == first, "in the clear the plan decides"
    assert silo.sampled(2) != first
    assert silo.sampled(1, silo="bank") != first


def test_attack_under_masks_nobody_else_can_tell_the_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silo = Silo(tmp_path, monkeypatch, 300, **MASKED)
    first = silo.sampled(1)
    assert silo.sampled(1) == first, "a killed training weighs the same"
    assert silo.sampled(1, bytes([1]) * 32) != first


@pytest.mark.parametrize(
    ("sections", "evaluates"),
    [
        ({}, True),
        ({"aggregation": {"weighting": "loss_reduction"}}, True),
        ({"aggregation": {"weighting": "size"}}, False),
        ({"training": {"loss_reduction": "logged"}}, False),
        ({"training": {"loss_reduction": "as_published"}}, False),
        ({"privacy": {"level": "record", "noise_multiplier": 1.0}, "training": {"dropout": 0.0}}, False),
    ],
)
def test_only_a_plan_that_weighs_by_it_pays_for_an_evaluation(sections: dict[str, Any], evaluates: bool) -> None:
    """Private training has a way of its own."""
    quiet = {"evaluation": {"every": 0, "initial": False, "last": False}} if "privacy" in sections else {}
    assert small_bundle(**quiet, **sections).plan.evaluates_losses is evaluates


# ---- logged --------------------------------------------------------------------------------------------------------


def test_logged_losses_are_token_means_of_their_windows_the_first_step_by_itself() -> None:
    """By hand, logged every 2 steps: 10 / 5 = 2; 20 / 10 = 2; (30 + 6) / (6 + 6) = 3; and the last step, 4 / 8 = 0.5."""
    log = LossLog.empty(2)
    for loss_sum, tokens in [(10.0, 5), (20.0, 10), (30.0, 6), (6.0, 6), (4.0, 8)]:
        log.add(loss_sum, tokens)
    log.close()
    log.close()
    assert log.losses == [2.0, 2.0, 3.0, 0.5]


@pytest.mark.parametrize(("batches", "factor"), [(30, 1.875), (20, 1.25), (16, 1.0), (8, 0.5)])
def test_as_published_what_an_epoch_leaves_over_inflates_all_losses_but_the_first(batches: int, factor: float) -> None:
    """Academic has 30 batches of 4, IMDB and Yelp 20, of which 16 make a step: 14 and 4 go with the next one. The loss
    is 2 throughout, over 12 epochs of a step each, logged after steps 1, 4, 8 and 12."""
    log = LossLog.empty(4)
    for _ in range(12):
        for group in [min(16, batches)] + ([batches - 16] if batches > 16 else []):
            log.add_as_published(2.0, batches=group, of=batches, accumulation=16)
    assert log.losses == [2.0 * min(factor, 1.0), *[2.0 * factor] * 3]
    assert (
        log.steps,
        logged_losses(
            batches * 4, section(epochs=12, gradient_accumulation=16, loss_log_steps=4, loss_reduction="as_published")
        ),
    ) == (12, 4)


def test_training_logs_as_published_where_the_plan_says_so() -> None:
    """Six batches, four to a step: 1.5 after the first step, of a loss that hardly moves. Two steps of the last window
    are not logged."""
    plan = section(epochs=6, batch_size=1, gradient_accumulation=4, learning_rate=1e-7, loss_log_steps=4)
    published = train(model(), encoded(6), plan.model_copy(update={"loss_reduction": "as_published"}), None)
    plain = train(model(), encoded(6), plan.model_copy(update={"loss_reduction": "logged"}), None)
    assert published.optimizer_steps == plain.optimizer_steps == 12, "training is the same"
    assert published.loss_first == pytest.approx(plain.loss_first)
    assert published.loss_last == pytest.approx(1.5 * plain.loss_last, rel=0.1)


@given(
    examples=st.integers(1, 300),
    epochs=st.integers(1, 4),
    batch=st.integers(1, 9),
    accumulation=st.integers(1, 5),
    every=st.integers(1, 9),
    published=st.booleans(),
)
def test_as_many_losses_are_counted_as_training_logs(
    examples: int, epochs: int, batch: int, accumulation: int, every: int, published: bool
) -> None:
    plan = section(
        epochs=epochs,
        batch_size=batch,
        gradient_accumulation=accumulation,
        loss_log_steps=every,
        loss_reduction="as_published" if published else "logged",
    )
    batches = -(-examples // batch)
    log = LossLog.empty(every)
    for _ in range(epochs):
        for start in range(0, batches, accumulation):
            group = min(accumulation, batches - start)
            if published:
                log.add_as_published(1.0, batches=group, of=batches, accumulation=accumulation)
            else:
                log.add(1.0, 1)
    if not published:
        log.close()
    assert len(log.losses) == logged_losses(examples, plan) >= 1


# ---- too few of them -------------------------------------------------------------------------------------------------


def plan_of(aggregation: dict[str, Any] | None = None, **training: Any) -> Plan:
    return small_bundle(aggregation=aggregation or {}, training=training).plan


LOGGED = {"epochs": 2, "batch_size": 16, "loss_log_steps": 4, "loss_reduction": "logged"}


def test_a_silo_that_would_log_too_few_losses_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError) as refused:
        require_losses(plan_of(**LOGGED), SILO, 32)
    assert str(refused.value) == (
        "this silo would log 2 of at least 3 losses a round on its 32 training examples, and its weight would follow "
        'from that: the plan has [training] loss_reduction = "logged", loss_log_steps = 4; have the operator set '
        'loss_reduction to "evaluated", loss_log_steps lower, or more epochs for this silo in [training.overrides]'
    )
    require_losses(plan_of(**LOGGED), SILO, 33)
    require_losses(plan_of(**LOGGED, overrides={SILO: {"epochs": 3}}), SILO, 32)
    require_losses(plan_of(**{**LOGGED, "loss_reduction": "evaluated"}), SILO, 32)
    require_losses(plan_of({"weighting": "size"}, **LOGGED), SILO, 32)


def test_as_published_counts_the_steps_that_the_code_makes() -> None:
    """33 examples are 3 batches: here 2 steps of 2 batches an epoch, there 1."""
    plan = plan_of(**{**LOGGED, "gradient_accumulation": 2, "epochs": 7, "loss_reduction": "as_published"})
    with pytest.raises(DataError, match="would log 2 of at least 3 losses"):
        require_losses(plan, SILO, 33)
    require_losses(plan, SILO, 64)
    assert LEAST_LOSSES == 3


def test_a_private_plan_logs_no_losses() -> None:
    private = {"level": "record", "noise_multiplier": 1.0}
    with pytest.raises(
        ValueError, match=r'\[training\] loss_reduction = "logged" does not go with \[privacy\] level = "record"'
    ):
        small_bundle(privacy=private, training={"dropout": 0.0, "loss_reduction": "logged"})


# ---- no weight -------------------------------------------------------------------------------------------------------


def test_under_masks_who_reduces_nothing_weighs_the_least_that_the_plan_allows() -> None:
    nothing = TrainingSummary(
        examples=10, loss_max=2.0, loss_min=2.0, loss_first=2.0, loss_last=3.0, optimizer_steps=4, seconds=1.0
    )
    masked, plain, by_size = (small_bundle(**it).plan for it in (MASKED, {}, {"aggregation": {"weighting": "size"}}))
    assert own_weight(masked.aggregation, nothing) == masked.aggregation.least_weight == 1.0
    assert masked.no_weight(nothing).endswith("weighs as little as the plan allows")
    assert plain.no_weight(nothing).endswith("weighs nothing")
    assert by_size.no_weight(nothing) == plain.no_weight(replace(nothing, loss_min=1.9)) == ""


@given(
    weighting=st.sampled_from(["lorar", "loss_reduction"]),
    cap=st.floats(0.5, 1e6),
    ratio=st.floats(1.0, 900.0),
    examples=st.integers(1, 10**6),
    part=st.floats(0.0, 1.0),
)
def test_attack_no_zero_is_told_under_masks_apart_from_what_is_next_to_nothing(
    weighting: str, cap: float, ratio: float, examples: int, part: float
) -> None:
    """The coordinator chooses caps, and by model and rate what each loss falls by. Whatever weighs less than the least
    weight weighs the same, to the last bit, so that the sum of weights has no edge at a reduction of zero."""
    section = AggregationSection.model_validate(
        {"secure_aggregation": True, "weighting": weighting, "max_weight": cap, "max_weight_ratio": ratio}
    )
    nothing = TrainingSummary(
        examples=examples, loss_max=0.0, loss_min=0.0, loss_first=0.0, loss_last=0.0, optimizer_steps=1, seconds=1.0
    )
    weighs = examples if weighting == "lorar" else 1
    little = replace(nothing, loss_max=part * 0.999 * section.least_weight / weighs)
    assert own_weight(section, little) == own_weight(section, nothing) == section.least_weight > 0.0
    more = replace(nothing, loss_max=2.0 * section.least_weight / weighs)
    assert own_weight(section, more) > section.least_weight
