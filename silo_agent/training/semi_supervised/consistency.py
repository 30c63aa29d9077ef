"""The consistency loss: what the student says of a question against what the teacher answered (equation 1 of
FedParsing).

For each batch the teacher answers greedily; its answer's tokens, with the end if it came to one, are the targets. Loss
"probabilities": along that answer, the squared distance of the student's next-token probabilities from the teacher's,
summed over the vocabulary. Loss "answer": cross entropy of the answer. Either is the mean over all tokens of the
effective batch, as the task loss is.

A question whose answer the teacher is less sure of than `min_confidence`, as the geometric mean of its tokens'
probabilities, or whose answer the silo's own database does not bear out (answer_filter.py), adds a loss of zero, and
its tokens count in the mean: the batch is no smaller, whatever is passed over. Nothing is read of a question but its
input.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import IGNORED, Batch, EncodedExamples, collate
from silo_agent.training.device import autocast
from silo_agent.training.generation import generated
from silo_agent.training.model.model import T5
from silo_agent.training.semi_supervised.teacher import Teacher
from silo_agent.training.task_loss import encoded_inputs, target_logits
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection
from silo_wire.plans.sections.training import TrainingSection

Counts = Callable[[Sequence[list[int]], Callable[[], bool]], bool]
"""(token ids of one question's answers, should_stop) -> whether the first of them counts."""


class Consistency:
    """What an optimizer step at a silo without labels lowers, in place of the task loss (local_trainer.Objective)."""

    def __init__(
        self,
        model: T5,
        student: Sequence[nn.Parameter],
        examples: EncodedExamples,
        training: TrainingSection,
        section: SemiSupervisedSection,
        counts: Counts | None = None,
    ) -> None:
        """`counts` says of each question, by its answers, whether the first of them counts; None: all do."""
        self._counts = counts
        self._model, self._examples, self._training, self._section = model, examples, training, section
        self._device = student[0].device
        self._teacher = Teacher(student, decay=section.ema_decay if section.teacher == "ema" else 1.0)

    def add_gradient(self, group: Iterable[list[int]], should_stop: Callable[[], bool]) -> tuple[float, int]:
        """Add the gradient of the group's mean over tokens; the summed loss, and how many tokens the answers have.

        Raises TrainingStopped.
        """
        batches = [self._answered(indices, should_stop) for indices in group]
        tokens = sum(batch.target_tokens for batch, _ in batches)
        total = torch.zeros((), device=self._device)
        for batch, kept in batches:
            if should_stop():
                raise TrainingStopped
            said = self._said(batch, kept)
            with autocast(self._device, self._training.precision):
                loss = self._loss(batch, said)
            torch.autograd.backward(loss / tokens)
            total += loss.detach()
        return float(total), tokens

    def stepped(self) -> None:
        self._teacher.follow()

    def kept(self) -> Sequence[torch.Tensor]:
        return self._teacher.tensors

    def _answered(self, indices: Sequence[int], should_stop: Callable[[], bool]) -> tuple[Batch, list[bool]]:
        """The questions at `indices`, with the teacher's answers as labels, and which of these count."""
        config = self._model.config
        most = self._training.max_output_tokens
        batch = collate(self._examples, indices, pad=config.pad_token_id, device=self._device)
        more = self._section.samples - 1 if self._counts is not None and self._section.filter == "agrees" else 0
        with self._teacher.in_its_place(self._model):
            encoded = encoded_inputs(self._model, batch)
            samples = [
                generated(
                    self._model,
                    encoded,
                    batch.attention_mask,
                    beams=1,
                    max_new_tokens=most,
                    should_stop=should_stop,
                    drawn=number > 0,
                )
                for number in range(1 + more)
            ]
        answers = samples[0]
        kept = [True] * len(answers)
        if self._counts is not None:
            kept = [self._counts(of_one, should_stop) for of_one in zip(*samples, strict=True)]
        targets = [[*answer, config.eos_token_id] if len(answer) < most else answer for answer in answers]
        labels = np.full((len(targets), max(map(len, targets))), IGNORED, dtype=np.int64)
        for row, target in zip(labels, targets, strict=True):
            row[: len(target)] = target
        tokens = sum(map(len, targets))
        return replace(batch, labels=torch.from_numpy(labels).to(self._device), target_tokens=tokens), kept

    def _said(self, batch: Batch, kept: Sequence[bool]) -> "_Said":
        with self._teacher.in_its_place(self._model):
            logits, targets = target_logits(self._model, batch)
            probabilities = logits.softmax(-1)  # as of the student: where the two agree, to the last bit
            logs = probabilities.gather(1, targets[:, None])[:, 0].log()
            lengths: list[int] = (batch.labels != IGNORED).sum(dim=1).tolist()
            sure = [
                (own.mean().exp().ge(self._section.min_confidence) & counts).expand(len(own))
                for own, counts in zip(torch.split(logs, lengths), kept, strict=True)
            ]
            return _Said(probabilities, torch.cat(sure))

    def _loss(self, batch: Batch, said: "_Said") -> torch.Tensor:
        logits, targets = target_logits(self._model, batch)
        if self._section.loss == "answer":
            of_tokens = functional.cross_entropy(logits, targets, reduction="none")
        else:
            of_tokens = (logits.softmax(-1) - said.probabilities).square().sum(-1)
        return (of_tokens * said.sure).sum()


@dataclass(frozen=True, slots=True)
class _Said:
    """Of each token of the teacher's answers: its probabilities over the vocabulary (tokens, V), and whether its answer
    is sure enough (tokens)."""

    probabilities: torch.Tensor
    sure: torch.Tensor


@contextmanager
def dropout_of(model: nn.Module, rate: float) -> Iterator[None]:
    """Within, every dropout of `model` is of this rate. T5's attention has it as a number, its other layers as a
    module."""
    before: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        name = "p" if isinstance(module, nn.Dropout) else "dropout"
        if isinstance(own := getattr(module, name, None), float):
            before.append((module, name, own))
            setattr(module, name, rate)
    try:
        yield
    finally:
        for module, name, own in before:
            setattr(module, name, own)
