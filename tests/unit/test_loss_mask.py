"""Which tokens of a target count in the loss: by a task's word, by every kind of tokenizer, in every loss that there is;
and examples of which none does."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from lorica_security.errors import DataError
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.training.data.batches import IGNORED, UNCOUNTED, Batch, collate, counted_tokens, encode_examples
from silo_agent.training.data.text_to_sql_data import Example
from silo_agent.training.data.tokenizer import SpecialTokens, TextTokenizer
from silo_agent.training.device import DeviceSettings
from silo_agent.training.private.per_example.batched_bias import batched_bias
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.task_loss import example_means, previous_tokens, summed_loss
from silo_agent.training.tasks import named
from silo_agent.training.tasks.text_task import TextTask
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT
from silo_wire.model_folders.folder_tokenizer import byte_tokenizer
from tests.support.tiny_t5 import bundle_of, random_model, tokenizer_json, vocabulary_size, write_model
from tests.unit.test_training_private_gradients import batch_of, clipped_sum, t5

CPU = torch.device("cpu")
PIECES = TextTokenizer(
    {"tokenizer.json": tokenizer_json()}, special=SpecialTokens(pad=0, end=1, start=0), vocabulary=vocabulary_size()
)
BYTES = TextTokenizer(
    {"tokenizer.json": byte_tokenizer(3).backend_tokenizer.to_str().encode()},
    special=SpecialTokens(pad=0, end=1, start=0),
    vocabulary=300,
)


def masked(batch: Batch, counts: torch.Tensor) -> Batch:
    labels = torch.where((batch.labels >= 0) & ~counts, UNCOUNTED - batch.labels, batch.labels)
    return Batch(batch.input_ids, batch.attention_mask, labels, int((labels >= 0).sum()))


@pytest.fixture(scope="module")
def counted() -> tuple[Batch, Batch]:
    """Of four examples: the last has no token that counts."""
    whole = batch_of(4, 9, 7)
    counts = torch.rand(whole.labels.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    counts[:, 0] = True
    counts[3] = False
    return whole, masked(whole, counts)


# --- losses


def test_the_loss_is_that_of_the_tokens_that_count(counted: tuple[Batch, Batch]) -> None:
    whole, part = counted
    model = t5().eval()
    logits = model(
        input_ids=whole.input_ids,
        attention_mask=whole.attention_mask,
        labels=whole.labels,
    ).logits
    each = functional.cross_entropy(
        logits.flatten(0, 1), whole.labels.flatten(), reduction="none", ignore_index=IGNORED
    ).view(whole.labels.shape)
    sums = (each * (part.labels >= 0)).sum(dim=1)
    means = sums / (part.labels >= 0).sum(dim=1).clamp(min=1)
    torch.testing.assert_close(summed_loss(model, part), sums.sum())
    torch.testing.assert_close(example_means(model, part), means)
    with batched_bias(model, 4):
        torch.testing.assert_close(example_losses(model, part), means)
    assert float(means[3]) == 0.0
    assert float(sums.sum()) < float(summed_loss(model, whole))


def test_the_decoder_is_told_what_does_not_count(counted: tuple[Batch, Batch]) -> None:
    model = t5()
    whole, part = (previous_tokens(model, batch.labels) for batch in counted)
    assert torch.equal(whole, part)


@pytest.mark.parametrize("backend", ["ghost", "loop"])
def test_an_example_of_which_nothing_counts_adds_nothing_to_a_private_sum(
    backend: Any, counted: tuple[Batch, Batch]
) -> None:
    """And the others what each has alone: its record is there or not, and the sum is the same."""
    part, model = counted[1], t5().train()
    norms, total = clipped_sum(model, part, backend)
    assert float(norms[3]) == 0.0
    assert bool((norms[:3] > 0).all())
    without = Batch(part.input_ids[:3], part.attention_mask[:3], part.labels[:3], 0)
    torch.testing.assert_close(clipped_sum(t5().train(), without, backend)[1], total, rtol=1e-6, atol=1e-9)
    loops = clipped_sum(t5().train(), part, "loop")[1]
    assert float((total - loops).norm()) < 1e-6 * float(loops.norm())


# --- tokens


WORDS = st.lists(
    st.sampled_from(["how", "many", "SELECT", "paris", "=", ";", "  ", "é", "\U0001f600", "x"]), min_size=1, max_size=8
).map(" ".join)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    text = draw(WORDS)
    places = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6))
    spans = draw(st.none() | st.lists(places, max_size=3))
    found = None if spans is None else tuple((begin, min(len(text), begin + more)) for begin, more in spans)
    return Example("a", "how many ?", text, "text", "", found)


@settings(max_examples=60, deadline=None)
@given(examples(), st.sampled_from([PIECES, BYTES]), st.integers(2, 40))
def test_tokens_count_that_have_a_character_that_does(example: Example, tokenizer: TextTokenizer, most: int) -> None:
    def targets(one: Example) -> list[int]:
        made = encode_examples(tokenizer, [one], schemas=None, max_input_tokens=40, max_output_tokens=most)
        return list(map(int, made.targets[0]))

    plain = targets(Example("a", example.question, example.query, "text"))
    found = targets(example)
    assert [it if it >= 0 else UNCOUNTED - it for it in found] == plain, "the text is the same"
    if example.counted is None:
        assert found == plain
        return
    characters = {at for begin, end in example.counted for at in range(begin, end)}
    places = tokenizer.places(example.query)
    for token, (start, stop) in zip(found[:-1], places, strict=False):
        assert (token >= 0) == bool(characters & set(range(start, stop)))
    assert (found[-1] >= 0) == (len(found) > 1 and found[-2] >= 0), "the end counts where what ends does"
    assert counted_tokens(np.asarray(found)) == sum(it >= 0 for it in found)


# --- tasks


def task(counted: Any) -> TextTask:
    return TextTask(name="text-to-text", scores=TEXT_TO_TEXT.scores, counted=counted)


def folder_of(place: Path, count: int = 3) -> Path:
    for split in ("train", "dev", "test"):
        lines = [{"id": f"{split}-{at}", "input": "how many ?", "target": "SELECT NAME ;"} for at in range(count)]
        (place / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return place


def test_a_task_says_what_counts_of_each_line(tmp_path: Path) -> None:
    data = task(lambda line, target: [(target.index("NAME"), len(target))]).data(folder_of(tmp_path))
    assert {example.counted for example in data.train} == {((7, 13),)}
    assert all(example.counted is None for example in task(None).data(tmp_path).train)
    assert not TEXT_TO_TEXT.masks_loss


@pytest.mark.parametrize(
    "spans",
    [[(0, 99)], [(-1, 3)], [(3, 3)], [(4, 2)], [("0", 3)], [(0.0, 3)], [(True, 3)], [(0,)], 7, None, [(0, 1)] * 1001],
)
def test_attack_spans_that_are_none_make_a_bad_line(spans: Any, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"counts .* of a target of 13 char|has 1001 spans that count|has no tokens that count"
    ):
        task(lambda line, target: spans).data(folder_of(tmp_path))


def test_errors_of_a_package_make_a_bad_line_too(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no tokens that count: ValueError"):
        task(lambda line, target: target.index("nowhere")).data(folder_of(tmp_path))


# --- training


@pytest.fixture
def counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The task of this name."""
    monkeypatch.setitem(named._BY_NAME, "text-to-text", task(lambda line, target: []))


def trainer(tmp_path: Path, **sections: Any) -> tuple[SiloTrainer, dict[str, Any]]:
    sections = {"task": {"kind": "text-to-text"}, "training": {"epochs": 1, "dropout": 0.0}, **sections}
    bundle = bundle_of(random_model(), **sections)
    data = named.task_of(bundle.plan.task).data(folder_of(tmp_path), labelled="semi_supervised" not in sections)
    model = write_model(random_model(), tmp_path / "model")
    made = SiloTrainer(bundle, data, "clinic", DeviceSettings(device="cpu", threads=1))
    return made, {
        "round_number": 1, "model_path": tmp_path / "model", "model": model, "update_path": tmp_path / "update",
    }  # fmt: skip


@pytest.mark.usefixtures("counts_nothing")
def test_a_silo_of_which_nothing_counts_is_told_so(tmp_path: Path) -> None:
    made, how = trainer(tmp_path)
    with pytest.raises(TrainingDiverged, match="counts no token of 3 examples"):
        made.train(**how)


@pytest.mark.usefixtures("counts_nothing")
def test_with_privacy_of_records_nothing_tells_that_nothing_counts(tmp_path: Path) -> None:
    """To end there would tell of the records: what leaves is noise."""
    private = {
        "level": "record", "noise_multiplier": 1.0, "steps": 1, "expected_batch_size": 2, "nominal_records": 2,
        "max_noise_to_signal": 1e6, "target_epsilon": 1000.0,
    }  # fmt: skip
    made, how = trainer(
        tmp_path,
        training={"epochs": 1, "dropout": 0.0, "max_grad_norm": 1.0},
        privacy=private,
        evaluation={"every": 0, "initial": False, "last": False},
    )
    assert made.train(**how).delta_norm > 0


@pytest.mark.usefixtures("counts_nothing")
def test_held_out_questions_are_scored_where_nothing_counts(tmp_path: Path) -> None:
    made, how = trainer(tmp_path)
    scored = made.evaluate(split="dev", model_path=how["model_path"], model=how["model"], same_result=None)
    assert (scored.examples, scored.loss_per_token) == (3, 0.0)
    batch = collate(made.encoded("train"), [0, 1], pad=0, device=CPU)
    assert batch.target_tokens == 0


@pytest.mark.usefixtures("counts_nothing")
def test_a_teachers_answers_have_no_such_tokens(tmp_path: Path) -> None:
    taught = {"teacher": "round", "unlabelled": ["clinic"], "order": "together"}
    alike = {"weighting": "equal", "momentum": 0.0}
    made, how = trainer(tmp_path, semi_supervised=taught, aggregation=alike)
    with pytest.raises(DataError, match="says which tokens count, and silo clinic trains on a teacher"):
        made.train(**how)
