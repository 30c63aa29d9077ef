"""A silo without labels: its teacher against an average in float64, its loss against the formula, and what it never
reads."""

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_t5 import CORPUS, SCHEMA, bundle_of, random_model, silo_data, tokenizer_json, write_model
from torch import nn
from torch.nn import functional

from lorica_security.errors import DataError, PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.service.ports import RoundModel
from silo_agent.settings import Settings
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.data.text_to_sql_data import load_silo_data
from silo_agent.training.data.tokenizer import SpecialTokens, TextTokenizer
from silo_agent.training.device import DeviceSettings
from silo_agent.training.local_trainer import train_locally
from silo_agent.training.model.model import add_adapters, layout_of
from silo_agent.training.semi_supervised.consistency import Consistency, dropout_of
from silo_agent.training.semi_supervised.span_corruption import Question, SpanCorruption
from silo_agent.training.semi_supervised.teacher import Teacher
from silo_agent.training.silo_trainer import LocalUpdate, SiloTrainer
from silo_agent.training.tasks.wikisql import WIKISQL
from silo_wire.plans.adapters import AdaptersSection, adapter_layout
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection
from silo_wire.plans.sections.training import TrainingSection

SPECIAL = SpecialTokens(pad=0, end=1, start=0)
CPU = DeviceSettings(device="cpu", threads=1)
TRAINING = {"learning_rate": 5e-3, "epochs": 2, "batch_size": 2, "max_output_tokens": 12}


# --- the teacher


@given(st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]), st.integers(0, 1 << 30))
@settings(max_examples=10)
def test_the_teacher_is_the_average_of_a_float64_oracle(decay: float, seed: int) -> None:
    """Over 1,000 steps, within 1e-6 of the largest parameter."""
    generator = torch.Generator().manual_seed(seed)
    student = nn.Parameter(torch.randn(64, generator=generator))
    teacher, oracle = Teacher([student], decay=decay), student.detach().double()
    for _ in range(1000):
        with torch.no_grad():
            student.add_(torch.randn(64, generator=generator), alpha=0.01)
        teacher.follow()
        oracle = decay * oracle + (1 - decay) * student.detach().double()
    assert (teacher.tensors[0].double() - oracle).abs().max() <= 1e-6 * oracle.abs().max()


def test_a_student_that_stands_still_is_its_teacher_to_the_last_bit() -> None:
    student = nn.Parameter(torch.randn(1000))
    teacher = Teacher([student], decay=0.99)
    for _ in range(50):
        teacher.follow()
    assert torch.equal(teacher.tensors[0], student)


@pytest.mark.parametrize("how", ["returns", "raises"])
def test_the_student_is_back_when_the_teacher_has_spoken(how: str) -> None:
    model = random_model(2)
    model.train()
    student = list(model.parameters())
    teacher = Teacher(student, decay=0.9)
    with torch.no_grad():
        for parameter in student:
            parameter.add_(1.0)
    before, taught = [one.detach().clone() for one in student], [one.clone() for one in teacher.tensors]

    def spoken() -> None:
        with teacher.in_its_place(model):
            assert not model.training
            assert not torch.is_grad_enabled()
            assert all(map(torch.equal, student, taught))
            if how == "raises":
                raise TrainingStopped

    if how == "raises":
        with pytest.raises(TrainingStopped):
            spoken()
    else:
        spoken()
    assert model.training
    assert all(map(torch.equal, student, before))
    assert all(map(torch.equal, teacher.tensors, taught))
    assert model.lm_head.weight is model.shared.weight, "tied as it was"


# --- the loss


def questions(count: int = 3) -> EncodedExamples:
    generator = torch.Generator().manual_seed(5)
    rows = tuple(
        np.asarray([*torch.randint(3, 90, (4 + n,), generator=generator).tolist(), 1], np.int32) for n in range(count)
    )
    none = tuple(np.empty(0, np.int32) for _ in rows)
    return EncodedExamples(inputs=rows, targets=none, inputs_cut=0, targets_cut=0, targets_with_unknown=0)


def section(**changes: Any) -> SemiSupervisedSection:
    return SemiSupervisedSection.model_validate({"unlabelled": ["lab"], "order": "together", **changes})


def by_hand(student: Any, teacher: Any, examples: EncodedExamples, most: int, loss: str, least: float) -> Any:
    """The mean loss by transformers alone, one question at a time; its tokens, and how many questions counted."""
    total, tokens, counted = torch.zeros((), dtype=torch.float64), 0, 0
    for ids in examples.inputs:
        question = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            answer = teacher.generate(input_ids=question, do_sample=False, max_new_tokens=most)[:, 1:]
            taught = teacher(input_ids=question, labels=answer).logits[0].double().softmax(-1)
        said = student(input_ids=question, labels=answer).logits[0].double()
        tokens += answer.shape[1]
        sure = taught.gather(1, answer[0][:, None]).log().mean().exp()
        if sure < least:
            continue
        counted += 1
        if loss == "answer":
            total = total + functional.cross_entropy(said, answer[0], reduction="sum")
        else:
            total = total + (said.softmax(-1) - taught).square().sum()
    return total, tokens, counted


@pytest.mark.parametrize("loss", ["probabilities", "answer"])
@pytest.mark.parametrize("least", [0.0, "between"])
def test_the_loss_and_its_gradient_are_those_of_the_formula(loss: str, least: float | str) -> None:
    """At a student that has moved away from its teacher, without dropout; some answers end, others are cut off."""
    teacher = random_model(7)
    with torch.no_grad():
        teacher.lm_head.weight[1] *= 6
    student, oracle = copy.deepcopy(teacher), copy.deepcopy(teacher)
    generator, examples = torch.Generator().manual_seed(3), questions()
    if least == "between":
        sure = sorted(_sure(teacher, examples))
        least = (sure[0] + sure[1]) / 2
    assert isinstance(least, float)
    objective = Consistency(
        student,
        list(student.parameters()),
        examples,
        TrainingSection(max_output_tokens=8),
        section(loss=loss, min_confidence=least),
    )
    with torch.no_grad():
        for ours, theirs in zip(student.parameters(), oracle.parameters(), strict=True):
            ours.add_(torch.randn(ours.shape, generator=generator), alpha=0.05)
            theirs.copy_(ours)
    total, tokens = objective.add_gradient([[0, 1], [2]], lambda: False)
    expected, of_tokens, counted = by_hand(oracle, teacher, examples, 8, loss, least)
    assert (tokens, counted) == (of_tokens, 3 if least == 0 else 2)
    assert total == pytest.approx(float(expected), rel=1e-4)
    (expected / tokens).backward()
    for ours, theirs in zip(student.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-6)


def _sure(teacher: Any, examples: EncodedExamples) -> Iterator[float]:
    for ids in examples.inputs:
        question = torch.from_numpy(ids.astype(np.int64))[None]
        with torch.no_grad():
            answer = teacher.generate(input_ids=question, do_sample=False, max_new_tokens=8)[:, 1:]
            taught = teacher(input_ids=question, labels=answer).logits[0].softmax(-1)
        yield float(taught.gather(1, answer[0][:, None]).log().mean().exp())


def test_a_student_that_agrees_has_nothing_to_learn_but_rounding() -> None:
    """Which an optimizer such as Adam makes whole steps of: no plan may have it so."""
    model = random_model(4)
    objective = Consistency(
        model, list(model.parameters()), questions(), TrainingSection(max_output_tokens=6), section()
    )
    total, tokens = objective.add_gradient([[0, 1, 2]], lambda: False)
    assert tokens > 0
    assert 0 <= total < 1e-9


def test_work_that_is_called_off_stops_between_tokens_with_the_student_in_place() -> None:
    model = random_model(4)
    before = [one.detach().clone() for one in model.parameters()]
    objective = Consistency(
        model, list(model.parameters()), questions(), TrainingSection(max_output_tokens=6), section()
    )
    with torch.no_grad():
        for tensor in objective.kept():
            tensor.add_(1.0)
    asked = iter([False, False, True])
    with pytest.raises(TrainingStopped):
        objective.add_gradient([[0, 1, 2]], lambda: next(asked))
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("least", [0.0, 0.5])
def test_a_round_model_that_overflows_ends_the_training_and_no_more(tmp_path: Path, least: float) -> None:
    """Whoever runs the rounds chooses it, and with it what the teacher answers: of such a model nothing, of no
    confidence at all."""
    model = random_model(3)
    with torch.no_grad():
        model.decoder.final_layer_norm.weight.fill_(3e38)
    data = load_silo_data(written(tmp_path / "data"), labelled=False)
    with pytest.raises(TrainingDiverged):
        trained(plan(model, min_confidence=least), model, data, tmp_path / "out")


def test_dropout_is_the_students_for_as_long_as_it_trains() -> None:
    model = random_model(1)

    def rates() -> set[float]:
        found = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
        return found | {
            module.dropout for module in model.modules() if isinstance(getattr(module, "dropout", None), float)
        }

    def while_it_trains() -> None:
        with dropout_of(model, 0.4):
            assert rates() == {0.4}
            raise TrainingStopped

    assert rates() == {0.1}
    with pytest.raises(TrainingStopped):
        while_it_trains()
    assert rates() == {0.1}


def test_a_model_that_is_sure_of_all_its_answers_leaves_nothing_to_learn_but_gaps() -> None:
    """Why under masks no round is of silos with teachers alone: its maker chooses of whom the sum is. Filling in gaps
    is learnt from what people asked."""
    model = random_model(4, untied=True)
    with torch.no_grad():
        model.lm_head.weight *= 1e5
    training = TrainingSection(max_output_tokens=6)
    taught = Consistency(model, list(model.parameters()), questions(), training, section(loss="answer"))
    assert taught.add_gradient([[0, 1, 2]], lambda: False)[0] == 0
    assert not any(parameter.grad.any() for parameter in model.parameters())
    tokenizer = TextTokenizer({"tokenizer.json": tokenizer_json()}, special=SPECIAL, vocabulary=10_000)
    asked = [Question(ids[:-1].tolist(), [1]) for ids in questions().inputs]
    SpanCorruption(model, torch.device("cpu"), tokenizer, asked, training).add_gradient([[0, 1, 2]], lambda: False)
    assert any(parameter.grad.any() for parameter in model.parameters())


# --- a silo's training


def plan(model: Any, *, training: dict[str, Any] | None = None, **changes: Any) -> PlanBundle:
    more = {key: changes.pop(key) for key in ("task", "adapters", "wire") if key in changes}
    return bundle_of(
        model,
        training={**TRAINING, **(training or {})},
        aggregation={"weighting": "equal"},
        semi_supervised=section(**changes).model_dump(mode="json"),
        **more,
    )


def written(folder: Path, *, lines: list[dict[str, Any]] | None = None) -> Path:
    folder.mkdir()
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    if lines is None:
        lines = [{"id": f"q-{n}", "question": CORPUS[n], "db_id": "places"} for n in range(3)]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def trained(bundle: PlanBundle, model: Any, data: Any, folder: Path, **how: Any) -> tuple[LocalUpdate, bytes]:
    folder.mkdir(exist_ok=True)
    manifest = write_model(model, folder / "model")
    update = SiloTrainer(bundle, data, "lab", CPU).train(
        round_number=1, model_path=folder / "model", model=manifest, update_path=folder / "update", **how
    )
    return update, (folder / "update").read_bytes()


POISON: list[Any] = [
    "SELECT 1 ;",
    "DROP TABLE PEOPLE",
    "",
    7,
    None,
    {"query": [1]},
    ["a"] * 50,
    "\ud800",
    "x" * 9000,
]


@pytest.mark.parametrize("teacher", ["ema", "mlm"])
def test_what_stands_in_query_changes_no_byte_of_an_update(tmp_path: Path, teacher: str) -> None:
    """Nor do dev and test, whatever these are: they are not even opened."""
    model = random_model(3)
    bundle = plan(model, teacher=teacher)
    clean = load_silo_data(written(tmp_path / "clean"), labelled=False)
    _, expected = trained(bundle, model, clean, tmp_path / "of-clean")
    for number, poison in enumerate(POISON):
        lines = [{"id": f"q-{n}", "question": CORPUS[n], "db_id": "places", "query": poison} for n in range(3)]
        folder = written(tmp_path / f"poisoned-{number}", lines=lines)
        (folder / "dev.jsonl").write_bytes(b"\xff nothing that parses")
        (folder / "test.jsonl").mkdir()
        data = load_silo_data(folder, labelled=False)
        assert (data.train, data.bad_lines, data.dev, data.test) == (clean.train, (), (), ())
        if number % 4 == 0 and (
            teacher == "ema" or not number
        ):  # the same examples give the same bytes; some say so of the whole way
            _, update = trained(bundle, model, data, tmp_path / f"of-{number}")
            assert update == expected
    assert np.frombuffer(expected, "<f4").any()


def test_sql_of_wikisqls_lines_is_not_read_either(tmp_path: Path) -> None:
    line = {"question": "who ?", "header": ["Name"], "types": ["text"]}
    folders = []
    for name, sql in (("without", {}), ("with", {"sql": "not an object", "query": 3})):
        folder = tmp_path / name
        folder.mkdir()
        lines = [json.dumps({"id": f"{n}", **line, **sql}) for n in range(2)]
        (folder / "train.jsonl").write_text("\n".join(lines))
        folders.append(folder)
    without, poisoned = (WIKISQL.data(folder, labelled=False) for folder in folders)
    assert without == poisoned
    assert [example.query for example in without.train] == ["", ""]


def test_a_question_without_an_answer_has_no_target(tmp_path: Path) -> None:
    bundle = plan(random_model(3))
    data = load_silo_data(written(tmp_path / "data"), labelled=False)
    assert [len(target) for target in SiloTrainer(bundle, data, "lab", CPU).encoded("train").targets] == [0, 0, 0]


def after_training(**changes: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Student and teacher after four steps from one and the same seed."""
    model = random_model(3)
    student = list(model.parameters())
    training = TrainingSection.model_validate({**TRAINING, "loss_reduction": "logged"})
    objective = Consistency(model, student, questions(), training, section(**changes))
    train_locally(
        model,
        student,
        questions(),
        training,
        seed=11,
        sample=None,
        round_parameters=None,
        checkpoint=None,
        on_progress=lambda fraction, loss: None,
        should_stop=lambda: False,
        clock=lambda: 0.0,
        objective=objective,
    )
    return [one.detach() for one in student], list(objective.kept())


def test_an_average_that_keeps_all_is_the_round_model() -> None:
    before = list(random_model(3).parameters())
    (frozen, of_round), (all_kept, of_all) = after_training(teacher="round"), after_training(ema_decay=1.0)
    assert all(map(torch.equal, frozen, all_kept))
    assert all(map(torch.equal, of_round, before))
    assert all(map(torch.equal, of_all, before))


def test_an_average_that_keeps_nothing_is_the_student() -> None:
    student, teacher = after_training(ema_decay=0.0)
    assert all(map(torch.equal, student, teacher))
    assert not all(map(torch.equal, student, random_model(3).parameters()))


def test_the_teacher_follows_between_steps() -> None:
    """Or all of them would answer the same."""
    some_kept, _ = after_training(ema_decay=0.5)
    frozen, _ = after_training(teacher="round")
    assert not all(map(torch.equal, some_kept, frozen))


def test_a_teacher_that_is_never_sure_moves_nothing(tmp_path: Path) -> None:
    model = random_model(3)
    data = load_silo_data(written(tmp_path / "data"), labelled=False)
    update, delta = trained(plan(model, min_confidence=0.999), model, data, tmp_path / "out")
    assert not np.frombuffer(delta, "<f4").any()
    assert (update.summary.examples, update.summary.optimizer_steps, update.summary.loss_max) == (3, 4, 0.0)


@pytest.mark.parametrize("loss", ["probabilities", "answer"])
def test_a_student_comes_closer_to_what_the_round_model_says(tmp_path: Path, loss: str) -> None:
    """Its dropout is what it learns to get over."""
    model = random_model(3)
    data = load_silo_data(written(tmp_path / "data"), labelled=False)
    losses: list[float] = []
    bundle = plan(
        model, loss=loss, teacher="round", student_dropout=0.3, training={"epochs": 25, "learning_rate": 3e-3}
    )
    trained(bundle, model, data, tmp_path / "out", on_progress=lambda fraction, told: losses.append(told))
    first, last = np.mean(losses[:10]), np.mean(losses[-10:])
    assert last < (0.9 if loss == "answer" else 1.0) * first


def test_adapters_have_a_teacher_of_their_own() -> None:
    """The base is shared: what a teacher takes is the adapters once more."""
    model = random_model(9)
    adapting = AdaptersSection(rank=2, alpha=16, layers=["q", "v", "wo"])
    adapters, _ = add_adapters(model, adapting, adapter_layout(layout_of(model), adapting))
    student = list(adapters.tensors)
    with torch.no_grad():
        for parameter in student:
            parameter.normal_(0.0, 0.3)
    objective = Consistency(model, student, questions(), TrainingSection(max_output_tokens=6), section(loss="answer"))
    assert sum(one.numel() for one in objective.kept()) == sum(one.numel() for one in student)
    taught, tokens = objective.add_gradient([[0, 1, 2]], lambda: False)
    assert {one.grad is not None for one in student} == {True}
    with torch.no_grad():
        for parameter in student:
            parameter.zero_()
    moved, of_the_same = objective.add_gradient([[0, 1, 2]], lambda: False)
    assert of_the_same == tokens, "the teacher answers as before, whatever the student does"
    assert moved != taught


def test_data_are_read_as_the_plan_says(tmp_path: Path) -> None:
    model = random_model(3)
    with pytest.raises(DataError, match="were read with labels, and the plan has it train without them"):
        trained(plan(model), model, silo_data([(CORPUS[0], CORPUS[3])]), tmp_path / "a")
    without = load_silo_data(written(tmp_path / "data"), labelled=False)
    with pytest.raises(DataError, match="were read without labels, and the plan has it train with them"):
        trained(bundle_of(model), model, without, tmp_path / "b")


def test_nothing_more_travels_than_from_a_silo_with_labels(tmp_path: Path) -> None:
    model = random_model(3)
    data = load_silo_data(written(tmp_path / "data"), labelled=False)
    bundle = plan(model)
    update, _ = trained(bundle, model, data, tmp_path / "without")
    labelled, _ = trained(
        bundle_of(model, training=TRAINING), model, silo_data([(CORPUS[0], CORPUS[3])]), tmp_path / "with"
    )
    assert update.manifest.layout_digest == labelled.manifest.layout_digest
    assert update.manifest.total_bytes == labelled.manifest.total_bytes
    assert sorted(path.name for path in (tmp_path / "without").iterdir()) == ["model", "update"]


# --- at the silo


def workshop(folder: Path) -> tuple[Workshop, SiloSources]:
    made = Settings.model_validate({"data": {"folder": str(folder)}, "training": {"device": "cpu", "threads": 1}})
    sources = SiloSources(made, scratch=folder / "scratch")
    policy = SiloPolicy(made.policy, SiloName("lab"))
    return Workshop(settings=made, policy=policy, sources=sources), sources


def test_a_silo_without_labels_is_prepared_and_keeps_out_of_scores(tmp_path: Path) -> None:
    """By a rule of its own, so that it trains on: nothing has failed."""
    model = random_model(3)
    work, sources = workshop(written(tmp_path / "data"))
    assert sources.data().labelled is False, "as its first line has it, before there is a plan"
    bundle = plan(model)
    summary = work.prepare(bundle, None)
    assert (summary.train_examples, summary.dev_examples, summary.bad_lines) == (3, 0, 0)
    round_model = RoundModel(file=tmp_path / "model", manifest=write_model(model, tmp_path / "model"))
    with pytest.raises(PolicyRefusal, match="has no labels in this plan"):
        work.evaluate(bundle=bundle, model=round_model, progress=lambda fraction: None, cancelled=lambda: False)


def test_a_plan_that_wants_labels_finds_none(tmp_path: Path) -> None:
    work, _ = workshop(written(tmp_path / "data"))
    with pytest.raises(DataError, match=r"bad lines of 3.*key query is missing"):
        work.prepare(bundle_of(random_model(3)), None)


def test_a_folder_with_labels_is_read_without_where_the_plan_says_so(tmp_path: Path) -> None:
    lines = [{"id": f"q-{n}", "question": CORPUS[n], "db_id": "places", "query": CORPUS[3]} for n in range(3)]
    folder = written(tmp_path / "data", lines=lines)
    (folder / "dev.jsonl").write_text(json.dumps({**lines[0], "id": "d"}))
    work, sources = workshop(folder)
    assert sources.data().labelled
    work.prepare(plan(random_model(3)), None)
    data = sources.data()
    assert {example.query for example in data.train} == {""}
    assert sources.data_for(replace(Reading(), labelled=True)).dev
