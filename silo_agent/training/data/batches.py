"""Encoded examples, and how they are grouped: similar lengths together, in an order that only the seed decides."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from silo_agent.training.data.serialisation import model_input
from silo_agent.training.data.text_to_sql_data import Example
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.data.views import View

IGNORED = -100
UNCOUNTED = -1000
"""A target's token that the decoder is told, and that does not count in the loss, is this less the token."""

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedExamples:
    """Token ids of a split, tokenised once; those of targets that do not count are `UNCOUNTED` less the token. Counts
    tell what the plan's limits or the vocabulary cost.

    `units` has the examples of each one to whom some belong; None where every example is a unit by itself.
    `other_inputs` are what further views of each example have in place of its input, view by view (views.py).
    """

    inputs: tuple[Ids, ...]
    targets: tuple[Ids, ...]
    inputs_cut: int
    targets_cut: int
    targets_with_unknown: int
    units: tuple[tuple[int, ...], ...] | None = None
    other_inputs: tuple[tuple[Ids, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def views(self) -> int:
        """Of each example, itself among them."""
        return 1 + len(self.other_inputs)

    def inputs_of(self, index: int) -> list[Ids]:
        """Of each view of one example, its own first."""
        return [self.inputs[index], *(inputs[index] for inputs in self.other_inputs)]

    def plain(self) -> "EncodedExamples":
        """Without further views."""
        return replace(self, other_inputs=())


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded to one length: input_ids and attention_mask (B, S), labels (B, T) with IGNORED for padding and `UNCOUNTED`
    less the token for what does not count, of which `target_tokens` has none.

    So many rows as `views` says, one after the other, are views of one example.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    target_tokens: int
    views: int = 1

    @property
    def examples(self) -> int:
        return len(self.labels) // self.views

    def rows_of(self, start: int, stop: int) -> "Batch":
        """Of the examples from `start` to before `stop`, with all of their views."""
        rows = slice(start * self.views, stop * self.views)
        return Batch(self.input_ids[rows], self.attention_mask[rows], self.labels[rows], 0, self.views)


def encode_examples(
    tokenizer: TextTokenizer,
    examples: Sequence[Example],
    *,
    schemas: Mapping[str, str] | None,
    max_input_tokens: int,
    max_output_tokens: int,
    other_views: Sequence[View] = (),
) -> EncodedExamples:
    """Both sides of each example, its database's schema from `schemas` behind the question; an input that is too long
    loses schema from its end, a target its own end.

    `other_views` are those of each example beside itself.
    """

    def cut(inputs: Sequence[list[int]]) -> tuple[Ids, ...]:
        return tuple(np.asarray(tokenizer.cut(ids, max_input_tokens), dtype=np.int32) for ids in inputs)

    inputs = tokenizer.encode(
        [model_input(example.question, schemas[example.db_id] if schemas else None) for example in examples]
    )
    # Without labels no target, not that of an empty text: nothing can be trained on it by mistake.
    of_labels = iter(tokenizer.encode([example.query for example in examples if example.query]))
    targets = [next(of_labels) if example.query else [] for example in examples]
    kept = [tokenizer.cut(ids, max_output_tokens) for ids in targets]
    return EncodedExamples(
        inputs=cut(inputs),
        targets=tuple(
            np.asarray(_without_uncounted(tokenizer, ids, example), dtype=np.int32)
            for ids, example in zip(kept, examples, strict=True)
        ),
        inputs_cut=sum(len(ids) > max_input_tokens for ids in inputs),
        targets_cut=sum(len(ids) > max_output_tokens for ids in targets),
        targets_with_unknown=sum(tokenizer.unknown in ids for ids in targets),
        units=_units(examples),
        other_inputs=tuple(cut(tokenizer.encode(list(map(view.input_of, examples)))) for view in other_views),
    )


def _without_uncounted(tokenizer: TextTokenizer, ids: list[int], example: Example) -> list[int]:
    """Tokens count that have a character of `example.counted`, and the end where the token before it does."""
    if example.counted is None or not ids:
        return ids
    places = tokenizer.places(example.query)[: len(ids) - 1]
    counts = [any(begin < stop and start < end for begin, end in example.counted) for start, stop in places]
    counts.append(bool(counts) and counts[-1])
    return [token if counted else UNCOUNTED - token for token, counted in zip(ids, counts, strict=True)]


def _units(examples: Sequence[Example]) -> tuple[tuple[int, ...], ...] | None:
    if not any(example.unit for example in examples):
        return None
    units: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        units.setdefault(example.unit, []).append(index)
    return tuple(map(tuple, units.values()))


def shuffled_batches(
    examples: EncodedExamples, *, batch_size: int, generator: torch.Generator, grouped: int = 1
) -> list[list[int]]:
    """Every example once, as index lists of `batch_size` (one may be shorter), in random order.

    Not sorted by length unless that is asked for: questions of one length share a template, so such batches teach one
    template at a time, and the spread of their losses would be taken for loss reduction. `grouped` batches at a time
    are made of examples that are sorted together, and all batches then shuffled.
    """
    order: list[int] = torch.randperm(len(examples), generator=generator).tolist()
    if grouped == 1:
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches: list[list[int]] = []
    for start in range(0, len(order), grouped * batch_size):
        batches += sorted_batches(examples, chosen=order[start : start + grouped * batch_size], batch_size=batch_size)
    return [batches[at] for at in torch.randperm(len(batches), generator=generator).tolist()]


def sorted_batches(examples: EncodedExamples, *, chosen: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """`chosen` in batches of similar length, longest first, so that memory runs out at once or not at all."""
    ordered = sorted(chosen, key=lambda index: _length(examples, index), reverse=True)
    for start in range(0, len(ordered), batch_size):
        yield ordered[start : start + batch_size]


def collate(
    examples: EncodedExamples,
    indices: Sequence[int],
    *,
    pad: int,
    device: torch.device,
    source: int = 0,
    target: int = 0,
) -> Batch:
    """All views of each example. Inputs are padded to `source` tokens and targets to `target`, or to the longest of
    them where that is more."""
    inputs = [view for index in indices for view in examples.inputs_of(index)]
    targets = [examples.targets[index] for index in indices for _ in range(examples.views)]
    input_ids = _padded(inputs, pad, source)
    lengths = np.fromiter(map(len, inputs), dtype=np.int64)
    attention_mask = np.arange(input_ids.shape[1]) < lengths[:, None]
    return Batch(
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy(attention_mask).to(device),
        labels=torch.from_numpy(_padded(targets, IGNORED, target)).to(device),
        target_tokens=sum(map(counted_tokens, targets)),
        views=examples.views,
    )


def counted_tokens(target: Ids) -> int:
    return int((target >= 0).sum())


def _length(examples: EncodedExamples, index: int) -> tuple[int, int]:
    return len(examples.targets[index]), len(examples.inputs[index])


def _padded(rows: Sequence[Ids], filler: int, least: int) -> NDArray[np.int64]:
    padded = np.full((len(rows), max(least, *map(len, rows))), filler, dtype=np.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded
