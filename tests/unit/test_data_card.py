"""The data card: by hand, beside a count that compares every line with every other, and who may look at it."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from silo_agent.training.data.data_card import Lengths, SplitCard, data_card
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import Example, SiloData

ROOT = Path(__file__).resolve().parents[2]
Line = tuple[str, str]


def data_of(train: Sequence[Line], dev: Sequence[Line] = (), *, labelled: bool = True) -> SiloData:
    def examples(lines: Sequence[Line]) -> tuple[Example, ...]:
        return tuple(Example(str(number), *line, "ward") for number, line in enumerate(lines))

    schema = Schema("ward", "", ())
    return SiloData(
        train=examples(train),
        dev=examples(dev),
        test=(),
        schema=schema,
        database=None,
        bad_lines=(),
        labelled=labelled,
    )


def test_by_hand() -> None:
    train = [
        ("how many beds", "select 1"),
        ("How  many BEDS", "SELECT 1"),  # repeats the first
        ("how many beds", "select 2"),  # contradicts both
        ("who is ill today", "select name from ill"),
    ]
    dev = [("who is  ill today", "select id from ill"), ("which ward", "select 1"), ("which bed", "select 3")]
    of_train, of_dev = data_card(data_of(train, dev))
    assert of_train == SplitCard(
        split="train",
        examples=4,
        questions=Lengths(3, 4),
        answers=Lengths(2, 4),
        repeated=1,
        contradicted=1,
        questions_in_train=0,
        answers_in_train=0,
    )
    assert (of_dev.questions_in_train, of_dev.answers_in_train, of_dev.repeated, of_dev.contradicted) == (1, 1, 0, 0)
    assert of_train.told(asked="question", said="answer") == (
        "4 lines, questions 3 words (longest 4), answers 2 words (longest 4), 1 repeated, 1 with another answer than "
        "before"
    )


def test_the_same_words_asked_of_another_database_are_another_question() -> None:
    first, second = (Example(str(it), "how many", "select 1", db_id) for it, db_id in enumerate(("ward", "bank")))
    data = data_of([], [])
    card = data_card(SiloData(**{**{name: getattr(data, name) for name in data.__slots__}, "train": (first, second)}))
    assert card[0].repeated == 0


def test_without_labels_nothing_is_said_of_answers() -> None:
    (card,) = data_card(data_of([("how many", ""), ("how many", "")], labelled=False))
    assert card.answers is None
    assert card.told(asked="input", said="target") == "2 lines, inputs 2 words (longest 2), no targets, 1 repeated"


texts = st.sampled_from(["a", "A", " a", "b", "b c", "B  c"])
lines = st.lists(st.tuples(texts, texts), min_size=1, max_size=12)


@given(train=lines, dev=lines)
def test_it_counts_what_comparing_every_pair_finds(train: list[Line], dev: list[Line]) -> None:
    def same(one: str, other: str) -> bool:
        return one.lower().split() == other.lower().split()

    of_train, of_dev = data_card(data_of(train, dev))
    for card, split in ((of_train, train), (of_dev, dev)):
        before = [[(q, a) for q, a in split[:at] if same(q, split[at][0])] for at in range(len(split))]
        repeats = [any(same(a, split[at][1]) for _, a in before[at]) for at in range(len(split))]
        assert card.repeated == sum(repeats)
        assert card.contradicted == sum(bool(before[at]) and not repeats[at] for at in range(len(split)))
    assert of_dev.questions_in_train == sum(any(same(q, known) for known, _ in train) for q, _ in dev)
    assert of_dev.answers_in_train == sum(any(same(a, known) for _, known in train) for _, a in dev)


@pytest.mark.parametrize("folder", ["silo_agent", "proto", "security"])
def test_nothing_but_the_check_looks_at_it(folder: str) -> None:
    """So that nothing of it can be part of a message: what the check finds goes to the terminal."""
    found = {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("data_card")
    }
    assert found == ({"silo_agent/edges/check/data_checks.py"} if folder == "silo_agent" else set())
