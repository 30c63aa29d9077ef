"""What a silo's people should know of their lines before a model is trained on them: how long they are, which stand
there twice, and which held-out ones training has seen.

Two texts count as the same in any case and with any white space. They are compared by 64-bit hashes, so that the card
takes 40 bytes of memory a line: of 100 million lines, two that differ count as the same in one card of 3,000. The card
is for the silo's people: nothing of it is part of any message.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from silo_agent.training.data.repeats import whole_numbers
from silo_agent.training.data.text_to_sql_data import SPLITS, Example, SiloData, Split


@dataclass(frozen=True, slots=True)
class Lengths:
    """In words: of the middle line, and of the longest."""

    middle: int
    longest: int

    def __str__(self) -> str:
        return f"{self.middle} words (longest {self.longest})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCard:
    """Counts are of lines. `repeated`: the same question with the same answer stood before. `contradicted`: it stood
    before with other answers alone. `questions_in_train` and `answers_in_train`: of dev and test, those that training
    sees too. `answers` is None, and so are these counts of them, where there are no labels."""

    split: Split
    examples: int
    questions: Lengths
    answers: Lengths | None
    repeated: int
    contradicted: int
    questions_in_train: int
    answers_in_train: int

    def told(self, *, asked: str, said: str) -> str:
        """In words; `asked` and `said` are what the task's people call one text of a line, and the other."""
        of_answers = f"no {said}s" if self.answers is None else f"{said}s {self.answers}"
        told = [f"{self.examples:,} lines", f"{asked}s {self.questions}", of_answers, f"{self.repeated:,} repeated"]
        if self.answers is not None:
            told.append(f"{self.contradicted:,} with another {said} than before")
        if self.split != "train":
            told.append(f"the {said}s of {self.answers_in_train:,} are in train, under whatever {asked}")
        return ", ".join(told)


def data_card(data: SiloData) -> tuple[SplitCard, ...]:
    """Of each split that has lines: train, dev, test."""
    train = _Lines.of(data.train)
    cards = []
    for split in SPLITS:
        examples = data.split(split)
        if not examples:
            continue
        lines = train if split == "train" else _Lines.of(examples)
        asked, said = len(np.unique(lines.questions)), len(np.unique(lines.pairs))
        cards.append(
            SplitCard(
                split=split,
                examples=len(examples),
                questions=lines.question_words,
                answers=lines.answer_words if data.labelled else None,
                repeated=len(examples) - said,
                contradicted=said - asked,
                questions_in_train=0 if split == "train" else _also_in(train.questions, lines.questions),
                answers_in_train=0 if split == "train" else _also_in(train.answers, lines.answers),
            )
        )
    return tuple(cards)


@dataclass(frozen=True, slots=True)
class _Lines:
    """64-bit hashes of each line's question, answer and of both."""

    questions: NDArray[np.int64]
    answers: NDArray[np.int64]
    pairs: NDArray[np.int64]
    question_words: Lengths
    answer_words: Lengths

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "_Lines":
        questions, answers, pairs = array("q"), array("q"), array("q")
        words, answer_words = array("q"), array("q")
        for example in examples:
            question, answer = (tuple(text.casefold().split()) for text in (example.question, example.query))
            words.append(len(question))
            answer_words.append(len(answer))
            questions.append(hash((example.db_id, question)))
            answers.append(hash((example.db_id, answer)))
            pairs.append(hash((example.db_id, question, answer)))
        return cls(
            whole_numbers(questions),
            whole_numbers(answers),
            whole_numbers(pairs),
            _lengths(words),
            _lengths(answer_words),
        )


def _lengths(words: "array[int]") -> Lengths:
    if not words:
        return Lengths(0, 0)
    numbers = whole_numbers(words)
    return Lengths(int(np.partition(numbers, len(numbers) // 2)[len(numbers) // 2]), int(numbers.max()))


def _also_in(train: NDArray[np.int64], lines: NDArray[np.int64]) -> int:
    return int(np.isin(lines, train).sum())
