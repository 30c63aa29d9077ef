"""What a silo's people should know of their lines before a model is trained on them: how long they are, which stand
there twice, and which held-out ones training has seen.

Two texts count as the same in any case and with any white space. The card is for the silo's people: nothing of it is
part of any message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high

from silo_agent.training.data.text_to_sql_data import Example, SiloData, Split


@dataclass(frozen=True, slots=True)
class Lengths:
    """In words: of the middle line, and of the longest."""

    middle: int
    longest: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> "Lengths":
        words = [len(text.split()) for text in texts]
        return cls(median_high(words), max(words))

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

    def __str__(self) -> str:
        of_answers = "no answers" if self.answers is None else f"answers {self.answers}"
        told = [f"{self.examples:,} lines", f"questions {self.questions}", of_answers, f"{self.repeated:,} repeated"]
        if self.answers is not None:
            told.append(f"{self.contradicted:,} with another answer than before")
        if self.split != "train":
            told.append(f"the answers of {self.answers_in_train:,} are in train, under whatever question")
        return ", ".join(told)


def data_card(data: SiloData) -> tuple[SplitCard, ...]:
    """Of each split that has lines: train, dev, test."""
    questions = {_question(example) for example in data.train}
    answers = {_answer(example) for example in data.train}
    cards = []
    for split in ("train", "dev", "test"):
        examples = data.split(split)
        if not examples:
            continue
        repeated, contradicted = _again(examples)
        cards.append(
            SplitCard(
                split=split,
                examples=len(examples),
                questions=Lengths.of([example.question for example in examples]),
                answers=Lengths.of([example.query for example in examples]) if data.labelled else None,
                repeated=repeated,
                contradicted=contradicted,
                questions_in_train=0 if split == "train" else sum(_question(it) in questions for it in examples),
                answers_in_train=0 if split == "train" else sum(_answer(it) in answers for it in examples),
            )
        )
    return tuple(cards)


def _again(examples: Sequence[Example]) -> tuple[int, int]:
    """How many lines repeat one before them, and how many contradict all of those that ask the same."""
    answers_of: dict[tuple[str, str], set[tuple[str, str]]] = {}
    repeated = contradicted = 0
    for example in examples:
        before = answers_of.setdefault(_question(example), set())
        answer = _answer(example)
        repeated += answer in before
        contradicted += bool(before) and answer not in before
        before.add(answer)
    return repeated, contradicted


def _question(example: Example) -> tuple[str, str]:
    return example.db_id, _same(example.question)


def _answer(example: Example) -> tuple[str, str]:
    return example.db_id, _same(example.query)


def _same(text: str) -> str:
    return " ".join(text.casefold().split())
