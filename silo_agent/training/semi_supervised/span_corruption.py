"""Training on questions alone without a teacher: what is missing of a question is to be filled in (span corruption,
Raffel et al. 2020, section 3.1.4), the baseline HydraNet + MLM of FedParsing for an encoder and decoder.

Of the n tokens of a question 0.15 n are taken out, in spans of 3 on average, and each span leaves a sentinel in the
input; the target is each sentinel, and behind it what it stands for:

    input    how many <extra_id_0> are over <extra_id_1> ; structured knowledge: ...
    target   <extra_id_0> of our patients <extra_id_1> sixty

The schema stays whole. A tokenizer made from scratch has no sentinels; there its piece for the unknown stands for each
of them, since they come in order. Spans are drawn anew each time, from the generator that dropout draws from. Nothing
is read of a question but its input.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from lorica_security.errors import DataError
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import TOGETHER, EncodedExamples, Ids, collate, ids_of, ids_record
from silo_agent.training.data.serialisation import model_input
from silo_agent.training.data.spool import Spool, SpoolPlace
from silo_agent.training.data.stored import Stored
from silo_agent.training.data.text_to_sql_data import Example
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.device import autocast
from silo_agent.training.model.model import T5
from silo_agent.training.task_loss import summed_loss
from silo_wire.plans.sections.training import TrainingSection

SHARE = 0.15
"""Of a question's tokens."""
SPAN_TOKENS = 3
"""Of a span, on average."""


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids of a question without an end, and of what stands behind it in the input, with its end."""

    tokens: Sequence[int]
    behind: Sequence[int]


class Questions(Sequence[Question]):
    """Of `examples`, apart from `schemas` behind them, by database. Tokens go to `spool`, as those of inputs do."""

    def __init__(
        self, tokenizer: TextTokenizer, examples: Sequence[Example], schemas: Mapping[str, str], spool: SpoolPlace
    ) -> None:
        texts = [model_input("", schema) for schema in schemas.values()]
        self._behind = dict(zip(schemas, tokenizer.encode(texts), strict=True))
        self._end = [tokenizer.end]
        self._examples = examples
        written = Spool(spool, "the tokens of this silo's questions")
        self.longest = 0
        of = iter(examples)
        while some := list(islice(of, TOGETHER)):
            for ids in tokenizer.encode([example.question for example in some]):
                self.longest = max(self.longest, len(ids) - 1)
                written.append(ids_record(ids[:-1]))
        self._tokens = Stored(written.finish(), ids_of)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Question:  # type: ignore[override]  # no slices
        return Question(self._tokens[index].tolist(), self._behind.get(self._examples[index].db_id, self._end))


class SpanCorruption:
    """What an optimizer step at a silo without labels lowers, in place of the task loss (local_trainer.Objective)."""

    def __init__(
        self,
        model: T5,
        device: torch.device,
        tokenizer: TextTokenizer,
        questions: Sequence[Question],
        training: TrainingSection,
    ) -> None:
        """Raises DataError where the tokenizer has nothing that could stand for a span."""
        self._model, self._device, self._tokenizer = model, device, tokenizer
        self._questions, self._training = questions, training
        if isinstance(questions, Questions):
            longest = questions.longest
        else:
            longest = max((len(one.tokens) for one in questions), default=0)
        self._sentinels = tokenizer.sentinels(max(1, round(longest * SHARE / SPAN_TOKENS)))
        if not self._sentinels:
            raise DataError(
                'the plan\'s tokenizer has neither <extra_id_0> nor a piece for the unknown, which teacher = "mlm" '
                "needs: have the operator set another teacher"
            )

    def add_gradient(self, group: Iterable[list[int]], should_stop: Callable[[], bool]) -> tuple[float, int]:
        """Add the gradient of the group's mean over target tokens; the summed loss, and how many tokens there are.

        Raises TrainingStopped.
        """
        corrupted = [self._corrupted(indices) for indices in group]
        tokens = sum(len(target) for examples in corrupted for target in examples.targets)
        total = torch.zeros((), device=self._device)
        for examples in corrupted:
            if should_stop():
                raise TrainingStopped
            pad = self._model.config.pad_token_id
            batch = collate(examples, range(len(examples)), pad=pad, device=self._device)
            with autocast(self._device, self._training.precision):
                loss = summed_loss(self._model, batch)
            torch.autograd.backward(loss / tokens)
            total += loss.detach()
        return float(total), tokens

    def stepped(self) -> None:
        """Nothing follows the student."""

    def kept(self) -> Sequence[torch.Tensor]:
        """Nothing: what is drawn next, the process's random state says."""
        return ()

    def _corrupted(self, indices: Sequence[int]) -> EncodedExamples:
        inputs, targets = zip(*(self._one(self._questions[index]) for index in indices), strict=True)
        return EncodedExamples(
            inputs=inputs, targets=targets, inputs_cut=0, targets_cut=0, targets_with_unknown=0, units=None
        )

    def _one(self, question: Question) -> tuple[Ids, Ids]:
        """Input and target, cut as the plan's limits say."""
        left, missing = list[int](), list[int]()
        sentinels = iter(self._sentinels)
        at = 0
        for stays, goes in spans(len(question.tokens), most=len(self._sentinels)):
            sentinel = next(sentinels)
            left += [*question.tokens[at : at + stays], sentinel]
            missing += [sentinel, *question.tokens[at + stays : at + stays + goes]]
            at += stays + goes
        cut, section = self._tokenizer.cut, self._training
        return (
            np.asarray(cut([*left, *question.behind], section.max_input_tokens), dtype=np.int32),
            np.asarray(cut([*missing, self._tokenizer.end], section.max_output_tokens), dtype=np.int32),
        )


def spans(tokens: int, *, most: int) -> list[tuple[int, int]]:
    """How many of `tokens` tokens, 1 or more, stay and then go, again and again, at most `most` times; drawn from the
    process's generator. Of a single token that one goes."""
    if tokens == 1:
        return [(0, 1)]
    go = min(max(round(tokens * SHARE), 1), tokens - 1)
    count = min(max(round(go / SPAN_TOKENS), 1), most, tokens - go)
    return list(zip(_parts(tokens - go, count), _parts(go, count), strict=True))


def _parts(total: int, count: int) -> list[int]:
    """`count` numbers of at least 1 that sum to `total`, every way as likely as another."""
    ends = sorted((torch.randperm(total - 1)[: count - 1] + 1).tolist())
    return [end - begin for begin, end in zip([0, *ends], [*ends, total], strict=True)]
