"""Views of a record in private training: their words, the clipped mean of their gradients beside float64, what stays as
it is, and what is refused."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional

from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.data.schema import Schema, serialise
from silo_agent.training.data.text_to_sql_data import Example
from silo_agent.training.data.views import WORDINGS, other_views
from silo_agent.training.device import DeviceSettings
from silo_agent.training.private.clipping import MARGIN, Backend, clipping
from silo_agent.training.private.per_example import chunks as chunks_module
from silo_agent.training.private.per_example.chunks import Chunks, padded, shape_of
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.private.private_trainer import schedule_of
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.plans.plan import Plan
from silo_wire.plans.privacy import MOST_VIEWS, PrivacySection
from tests.support.as_on_a_gpu import as_on_a_gpu
from tests.support.coordinator_edges import A, make_plan
from tests.support.tiny_t5 import SCHEMA
from tests.unit.test_private_weights import LENGTHS, encoded, made
from tests.unit.test_training_adapters import PAIRS, data
from tests.unit.test_training_iterate_average import private, seen
from tests.unit.test_training_private_gradients import BACKENDS, VOCABULARY, parameters_of, t5
from tests.unit.test_training_private_trainer import SCHEDULE, examples_of, flat, loss_sum, train

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
CPU_ONLY = DeviceSettings(device="cpu", threads=1)
BOUND = 0.4
EXACT = 1e-5
VIEWS = 3
QUESTION = "how many {rows} of 100% are there ?"


def with_views(examples: EncodedExamples, views: int, seed: int = 7, vocabulary: int = VOCABULARY) -> EncodedExamples:
    """Each further view of other words and of another length."""
    generator = np.random.default_rng(seed)
    others = [
        tuple(
            generator.integers(2, vocabulary, generator.integers(1, 30)).astype(np.int32) for _ in range(len(examples))
        )
        for _ in range(views - 1)
    ]
    return replace(examples, other_inputs=tuple(others))


def adapted() -> nn.Module:
    model = get_peft_model(t5(), LoraConfig(r=4, target_modules=["q", "v", "wi", "wo"], lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    inner: nn.Module = model.base_model.model
    return inner


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": t5,
    "untied, gated": lambda: t5(gated=True, tied=False),
    "adapters": adapted,
}
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def mean_gradients(model: nn.Module, examples: EncodedExamples) -> list[torch.Tensor]:
    """Of each example, flat and float64, by transformers' own forward pass, one view at a time and without padding: the
    mean over views."""
    exact: Any = copy.deepcopy(model).double().eval()
    found = []
    for index in range(len(examples)):
        labels = torch.from_numpy(examples.targets[index].astype(np.int64))
        gradients = []
        for ids in examples.inputs_of(index):
            logits = exact(input_ids=torch.from_numpy(ids.astype(np.int64))[None], labels=labels[None]).logits
            made = torch.autograd.grad(functional.cross_entropy(logits[0], labels), parameters_of(exact))
            gradients.append(torch.cat([part.flatten() for part in made]))
        found.append(torch.stack(gradients).mean(dim=0))
    return found


def clipped_sum(
    model: nn.Module,
    examples: EncodedExamples,
    backend: Backend,
    *,
    most: int = 8,
    indices: Sequence[int] | None = None,
    bound: float = BOUND,
) -> tuple[dict[int, float], torch.Tensor]:
    """Norms by example, and the flat sum."""
    model.train()
    parameters = parameters_of(model)
    way = clipping(backend, model, parameters, max_grad_norm=bound)
    norms: dict[int, float] = {}
    for some, batch in Chunks(model, most=most).of(examples, range(len(examples)) if indices is None else indices):
        norms |= dict(zip(some, way.accumulate(batch).tolist(), strict=False))
    return norms, torch.cat([parameter.summed_grad.flatten() for parameter in parameters])  # type: ignore[attr-defined]


# --- gradients


@every_backend
@every_model
@pytest.mark.parametrize("most", [1, 8])
def test_a_sum_is_that_of_clipped_means_over_views(make: Callable[[], nn.Module], backend: Backend, most: int) -> None:
    model, examples = make(), with_views(examples_of(6), VIEWS)
    expected = mean_gradients(model, examples)
    norms, total = clipped_sum(model, examples, backend, most=most)
    assert [norms[index] for index in range(6)] == pytest.approx([float(one.norm()) for one in expected], rel=EXACT)
    assert min(norms.values()) > BOUND, "views that are clipped one by one would come to the same where nothing is cut"
    clipped = torch.stack([one * min(1.0, BOUND * (1 - MARGIN) / float(one.norm())) for one in expected]).sum(dim=0)
    assert float((total - clipped).norm() / clipped.norm()) < EXACT


@every_backend
def test_views_whose_gradients_are_shorter_than_the_bound_are_averaged_and_not_summed(backend: Backend) -> None:
    """The same view four times over is the record once."""
    model, plain = t5(), examples_of(5)
    _, once = clipped_sum(model, plain, backend, bound=1e3)
    norms, four = clipped_sum(model, replace(plain, other_inputs=(plain.inputs,) * 3), backend, bound=1e3)
    assert max(norms.values()) < 500
    assert float((once - four).norm() / once.norm()) < EXACT


@every_backend
def test_no_example_adds_more_than_the_bound_whatever_its_views_are(backend: Backend) -> None:
    """The last view is the record once more, whose gradient points where the record's does."""
    model, plain = t5(), examples_of(5)
    several = with_views(plain, 4)
    examples = replace(several, other_inputs=(*several.other_inputs[:-1], plain.inputs))
    _, whole = clipped_sum(model, examples, backend)
    for left_out in range(5):
        _, fewer = clipped_sum(model, examples, backend, indices=[index for index in range(5) if index != left_out])
        assert float((whole - fewer).norm()) <= BOUND


@every_backend
@pytest.mark.parametrize("views", [2, 4])
def test_an_example_of_which_one_view_is_not_finite_counts_as_zero(backend: Backend, views: int) -> None:
    model = t5(tied=False)
    examples = with_views(examples_of(4), views)
    clean, _ = clipped_sum(model, examples, backend)
    inputs = [[np.where(ids == 50, 51, ids) for ids in view] for view in (examples.inputs, *examples.other_inputs)]
    targets = tuple(np.where(ids == 50, 51, ids) for ids in examples.targets)
    inputs[-1][2][0] = 50
    examples = replace(examples, inputs=tuple(inputs[0]), targets=targets, other_inputs=tuple(map(tuple, inputs[1:])))
    with torch.no_grad():
        model.shared.weight[50] = float("inf")
    norms, total = clipped_sum(model, examples, backend)
    assert len(clean) == 4
    assert [np.isfinite(norms[index]) for index in range(4)] == [True, True, False, True]
    _, others = clipped_sum(model, examples, backend, indices=[0, 1, 3])
    assert float((total - others).norm() / others.norm()) < EXACT


@pytest.mark.parametrize("gated", [False, True])
def test_every_example_has_the_bits_that_it_has_alone_with_its_views(gated: bool) -> None:
    """Losses and norms, in whatever company; a chunk holds as many rows as it may, or one example."""
    model = made(gated=gated, width=64).train()
    few = encoded(LENGTHS[-20:])
    examples = replace(few, other_inputs=(few.inputs, few.inputs))
    together = list(Chunks(model, most=2 * VIEWS).of(examples, range(20)))
    assert {len(batch.labels) for _, batch in together} == {VIEWS, 2 * VIEWS}
    for indices, batch in together:
        norms = clipping("ghost", model, parameters_of(model), max_grad_norm=1.0).accumulate(batch)
        losses = example_losses(model, batch).view(-1, VIEWS)
        for row, index in enumerate(indices):
            alone = padded(examples, [index], shape_of(examples, index), pad=0, device=CPU)
            norm = clipping("ghost", model, parameters_of(model), max_grad_norm=1.0).accumulate(alone)
            assert torch.equal(losses[row], example_losses(model, alone))
            assert float(norms[row]) == pytest.approx(float(norm[0]), rel=1e-12)


def test_an_example_is_padded_by_its_own_longest_view() -> None:
    plain = examples_of(2)
    examples = replace(plain, other_inputs=((np.arange(2, 42, dtype=np.int32), plain.inputs[1]),))
    assert shape_of(examples, 0).source == 48
    assert shape_of(examples, 1) == shape_of(plain, 1)


def test_examples_whose_rows_depend_on_others_are_computed_with_their_own_views_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a processor that cuts a product of more rows than an example has another way."""
    plain = examples_of(1)
    same = replace(plain, inputs=plain.inputs * 8, targets=plain.targets * 8)
    examples = replace(same, other_inputs=(same.inputs,) * (VIEWS - 1))
    real = torch.nn.functional.linear

    def other_bits(entered: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = real(entered, weight, bias)
        return made * (1 + 2**-22) if entered.shape[0] > VIEWS else made

    monkeypatch.setattr(chunks_module, "_FOUND", {})
    monkeypatch.setattr(torch.nn.functional, "linear", other_bits)
    assert all(len(indices) == 1 for indices, _ in Chunks(t5(), most=8 * VIEWS).of(examples, range(8)))


@every_backend
def test_a_sum_is_the_same_where_empty_examples_fill_chunks_up(backend: Backend) -> None:
    """Of as many rows as a real one has: on a GPU."""
    model, examples = t5(), with_views(examples_of(6), VIEWS)
    norms, total = clipped_sum(model, examples, backend)
    with as_on_a_gpu():
        for some, batch in Chunks(model, most=4 * VIEWS).of(examples, range(6)):
            assert len(batch.labels) == 4 * VIEWS
            assert batch.empty == 4 - len(some)
        filled_norms, filled_total = clipped_sum(model, examples, backend, most=4 * VIEWS)
    assert filled_norms == pytest.approx(norms, rel=EXACT)
    assert float((filled_total - total).norm() / total.norm()) < EXACT


# --- in private training


def test_a_record_that_is_its_only_view_is_trained_to_the_bits_that_it_had_before_there_were_views() -> None:
    models = [t5(), t5()]
    examples = examples_of(30)
    assert examples.views == 1
    with seen() as before, pytest.MonkeyPatch.context() as patched:
        # What was done with gradients before: nothing was put one behind the other, and losses were summed.
        patched.setattr(
            "silo_agent.training.private.per_example.ghost_norms.ExampleGradients._by_example",
            lambda gradients, rows: rows,
        )
        train(models[0], examples)
    with seen() as after:
        train(models[1], examples)
    assert torch.equal(*map(flat, models))
    assert all(torch.equal(*pair) for pair in zip(before.gradients, after.gradients, strict=True))


def test_views_change_neither_draws_nor_weights_and_change_gradients() -> None:
    plain = examples_of(30)
    examples = with_views(plain, VIEWS)
    of = []
    for each in (plain, examples):
        with seen() as it:
            train(t5(), each, replace(SCHEDULE, steps=1))
        of.append(it)
    assert of[0].drawn == of[1].drawn
    assert len(of[1].drawn) == 1  # no record is drawn once for each view
    assert of[0].sums[0][0] == of[1].sums[0][0] == loss_sum(t5(), plain, bound=8.0)
    assert not torch.equal(of[0].gradients[0], of[1].gradients[0])


def test_a_unit_of_several_records_sends_one_of_them_with_its_views() -> None:
    examples = replace(with_views(examples_of(6), VIEWS), units=((0, 1, 2), (3,), (4, 5)))
    with seen() as it:
        train(t5(), examples, replace(SCHEDULE, sampling_rate=1.0))
    assert all(len(drawn) == 3 for drawn in it.drawn)


# --- what a view is


def test_every_number_of_views_has_its_words() -> None:
    assert len(WORDINGS) == MOST_VIEWS - 1
    assert len(set(WORDINGS)) == len(WORDINGS)
    assert PrivacySection(level="record", augmentations=MOST_VIEWS).augmentations == MOST_VIEWS


def test_a_view_says_the_question_whole_and_the_schema_in_another_order() -> None:
    example = Example("1", QUESTION, "SELECT 1", SCHEMA.db_id)
    views = other_views(MOST_VIEWS, [SCHEMA])
    inputs = [view.input_of(example) for view in views]
    assert len(set(inputs)) == MOST_VIEWS - 1
    for text in inputs:
        question, schema = text.split(" ; structured knowledge: ")
        assert QUESTION in question
        assert sorted(schema.replace(" |", "").split()) == sorted(serialise(SCHEMA).replace(" |", "").split())
    assert serialise(SCHEMA) not in inputs[0]


def test_tables_and_columns_stand_in_a_circle() -> None:
    raw = (
        b'{"db_id":"d","source":"s","tables":['
        b'{"name":"town","columns":[{"name":"a","sql_type":"TEXT","type":"text","primary_key":false},'
        b'{"name":"b","sql_type":"TEXT","type":"text","primary_key":false}]},'
        b'{"name":"road","columns":[{"name":"c","sql_type":"TEXT","type":"text","primary_key":false}]}]}'
    )
    schema = Schema.from_json(raw, Path("schema.json"))
    first, second = other_views(3, [schema])
    assert first.schemas == {"d": "| road : c | town : b , a"}
    assert second.schemas == {"d": "| town : a , b | road : c"}
    assert [view.schemas for view in other_views(3, None)] == [None, None]


def plan_of(state: Path, **values: object) -> Any:
    return make_plan(
        state,
        overrides={
            "privacy.level": "record",
            "privacy.noise_multiplier": 3.0,
            "training.dropout": 0.0,
            "training.epochs": 1,
            "evaluation.every": 0,
            "evaluation.initial": False,
            "evaluation.last": False,
            **values,
        },
    )


@pytest.mark.parametrize("schema_in_input", [True, False])
def test_a_silo_makes_views_of_what_it_trains_on_and_of_nothing_else(tmp_path: Path, schema_in_input: bool) -> None:
    section = {"training.schema_in_input": schema_in_input, "training.max_input_tokens": 512}
    trainers = [
        SiloTrainer(plan_of(tmp_path / str(views), **section, **{"privacy.augmentations": views}), data(), A, CPU_ONLY)
        for views in (1, VIEWS)
    ]
    plain, several = (trainer.encoded("train") for trainer in trainers)
    assert (plain.views, several.views, trainers[1].encoded("dev").views) == (1, VIEWS, 1)
    assert all(np.array_equal(*pair) for pair in zip(plain.inputs, several.inputs, strict=True))
    examples = data().train
    for view, of_view in zip(
        other_views(VIEWS, [SCHEMA] if schema_in_input else None), several.other_inputs, strict=True
    ):
        texts = trainers[1]._model.tokenizer.encode([view.input_of(example) for example in examples])
        assert [ids.tolist() for ids in of_view] == texts
    assert len(examples) == len(PAIRS)


# --- in plans


def test_ledger_entries_and_cost_are_the_same_with_and_without() -> None:
    plain, other = Plan.model_validate(private()), Plan.model_validate(private(augmentations=4))
    assert plain.privacy.augmentations == 1
    assert plain.releases_of_round == other.releases_of_round
    assert plain.privacy.epsilon(rounds=5, weighted=True) == other.privacy.epsilon(rounds=5, weighted=True)
    assert schedule_of(plain, plain.training) == schedule_of(other, other.training)
    assert plain.digest != other.digest


@pytest.mark.parametrize("level", ["none", "silo"])
def test_views_are_of_records_that_are_clipped(level: str) -> None:
    with pytest.raises(ValueError, match=rf'augmentations = 2 does not go with level = "{level}".*set it to 1'):
        Plan.model_validate(private(level=level, augmentations=2))


@pytest.mark.parametrize("views", [0, -1, MOST_VIEWS + 1, 1.5])
def test_a_number_of_views_that_is_none_is_refused_by_name(views: float) -> None:
    with pytest.raises(ValueError, match="augmentations"):
        Plan.model_validate(private(augmentations=views))
