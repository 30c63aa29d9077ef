"""A silo without labels that fills in what is missing of its questions: what is taken out, against T5's scheme, and the
loss against transformers."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from support.tiny_t5 import random_model, tiny_tokenizer, tokenizer_json

from lorica_security.errors import DataError
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.data.tokenizer import SpecialTokens, TextTokenizer
from silo_agent.training.semi_supervised.span_corruption import Question, SpanCorruption, spans
from silo_wire.plans.sections.training import TrainingSection

CPU = torch.device("cpu")
SPECIAL = SpecialTokens(pad=0, end=1, start=0)
MODEL = random_model()
BEHIND = [50, 51, 52, 1]


@cache
def with_sentinels() -> TextTokenizer:
    """As a published T5's: 100 tokens of their own."""
    own = tiny_tokenizer(100)
    return TextTokenizer(
        {"tokenizer.json": own.backend_tokenizer.to_str().encode()}, special=SPECIAL, vocabulary=len(own)
    )


@cache
def from_scratch() -> TextTokenizer:
    return TextTokenizer({"tokenizer.json": tokenizer_json()}, special=SPECIAL, vocabulary=10_000)


def objective(
    tokens: Sequence[Sequence[int]], tokenizer: TextTokenizer | None = None, model: Any = None, **limits: int
) -> SpanCorruption:
    section = TrainingSection(**{"max_input_tokens": 512, "max_output_tokens": 256, **limits})
    questions = [Question(list(own), BEHIND) for own in tokens]
    return SpanCorruption(model or MODEL, CPU, tokenizer or with_sentinels(), questions, section)


@given(tokens=st.integers(1, 600), most=st.integers(1, 100), seed=st.integers(0, 2**32))
@example(tokens=1, most=1, seed=0)
@example(tokens=2, most=9, seed=0)
@example(tokens=600, most=1, seed=0)
def test_spans_cover_a_question_and_take_out_its_share(tokens: int, most: int, seed: int) -> None:
    """As T5's random_spans_noise_mask has it: rounded, at least one, never all but of a single token."""
    torch.manual_seed(seed)
    drawn = spans(tokens, most=most)
    stay, go = (sum(part) for part in zip(*drawn, strict=True))
    assert stay + go == tokens
    if tokens == 1:
        assert drawn == [(0, 1)]
        return
    assert go == min(max(round(0.15 * tokens), 1), tokens - 1)
    assert all(part >= 1 for both in drawn for part in both)
    assert len(drawn) == min(max(round(go / 3), 1), most)


def test_every_way_to_part_a_question_comes_up() -> None:
    torch.manual_seed(0)
    drawn = {tuple(spans(26, most=9)) for _ in range(200)}
    assert {own[0][0] for own in drawn} == {22}, "one span of four, at the end: as T5 has it where there is one"
    ways = {tuple(own) for own in (spans(40, most=9) for _ in range(2000))}
    assert {(own[0][1], own[1][1]) for own in ways} == {(n, 6 - n) for n in range(1, 6)}
    assert {own[0][0] for own in ways} == set(range(1, 34))


@given(
    question=st.lists(st.integers(10, 49), min_size=1, max_size=200),
    seed=st.integers(0, 2**32),
    scratch=st.booleans(),
)
def test_input_and_target_together_are_the_question(question: list[int], seed: int, scratch: bool) -> None:
    """And what stands behind it is whole; the sentinels come in T5's order."""
    tokenizer = from_scratch() if scratch else with_sentinels()
    sentinels = tokenizer.sentinels(100)
    assert len(sentinels) == 100
    assert len(set(sentinels)) == (1 if scratch else 100)
    torch.manual_seed(seed)
    given_, target = (list(ids) for ids in objective([question], tokenizer)._one(Question(question, BEHIND)))
    assert given_[-len(BEHIND) :] == BEHIND
    assert target[-1] == 1
    missing: list[list[int]] = []
    for token in target[:-1]:
        if token == sentinels[len(missing) if not scratch else 0]:
            missing.append([])
        else:
            missing[-1].append(token)
    found, at = list[int](), 0
    for token in given_[: -len(BEHIND)]:
        if token == sentinels[at if not scratch else 0] and at < len(missing):
            found += missing[at]
            at += 1
        else:
            found.append(token)
    assert (found, at) == (question, len(missing))


def test_what_is_too_long_is_cut_as_a_plan_says() -> None:
    torch.manual_seed(0)
    at = objective([list(range(10, 50)) * 3], max_input_tokens=20, max_output_tokens=8)
    ids, target = at._one(at._questions[0])
    assert (len(ids), len(target), ids[-1], target[-1]) == (20, 8, 1, 1)


def test_a_tokenizer_without_anything_to_stand_for_a_span_is_refused() -> None:
    tokenizer = copy.copy(from_scratch())
    tokenizer.unknown = None
    with pytest.raises(DataError, match="neither <extra_id_0> nor a piece for the unknown"):
        objective([[10, 11]], tokenizer)


def test_the_loss_and_its_gradient_are_those_of_transformers() -> None:
    """The mean over all target tokens of the effective batch, whatever its batches are."""
    ours = random_model(7)
    ours.eval()  # no dropout
    theirs = copy.deepcopy(ours)
    tokenizer = from_scratch()
    questions = [list(range(10, 16)), list(range(10, 45)), [11]]
    at = objective(questions, tokenizer, ours)
    torch.manual_seed(5)
    total, tokens = at.add_gradient([[0, 1], [2]], lambda: False)
    torch.manual_seed(5)
    expected, count = torch.zeros(()), 0
    for question in at._questions:
        ids, target = (torch.from_numpy(row).long()[None] for row in at._one(question))
        said = theirs(input_ids=ids, labels=target)
        expected = expected + said.loss * target.shape[1]
        count += target.shape[1]
    assert tokens == count
    assert total == pytest.approx(float(expected), rel=1e-5)
    (expected / tokens).backward()
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-6)


def test_work_that_is_called_off_stops_between_batches() -> None:
    asked = iter([False, True])
    with pytest.raises(TrainingStopped):
        objective([[10, 11], [12, 13]], from_scratch()).add_gradient([[0], [1]], lambda: next(asked))


def test_spans_are_drawn_anew_each_time() -> None:
    torch.manual_seed(0)
    at = objective([list(range(10, 50))])
    drawn: list[EncodedExamples] = [at._corrupted([0]) for _ in range(2)]
    assert drawn[0].inputs[0].tolist() != drawn[1].inputs[0].tolist()
