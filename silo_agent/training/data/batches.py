"""Encoded examples, and how they are grouped: similar lengths together, in an order that only the seed decides.

There may be more of them than memory holds: token ids lie in a spool, of which a batch is read when it is made, and an
order is 8 bytes an example.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, overload

import numpy as np
import torch
from numpy.typing import NDArray

from silo_agent.training.data.repeats import UnitKeys
from silo_agent.training.data.serialisation import model_input
from silo_agent.training.data.spool import Spool, SpoolPlace
from silo_agent.training.data.stored import Stored
from silo_agent.training.data.text_to_sql_data import Example
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.data.views import View

IGNORED = -100
UNCOUNTED = -1000
"""A target's token that the decoder is told, and that does not count in the loss, is this less the token."""

TOGETHER: Final = 256
"""Examples that are tokenised at a time."""

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedExamples:
    """Token ids of a split, tokenised once; those of targets that do not count are `UNCOUNTED` less the token. Counts
    tell what the plan's limits or the vocabulary cost.

    `units` has the examples of each one to whom some belong; None where every example is a unit by itself.
    `other_inputs` are what further views of each example have in place of its input, view by view (views.py).
    """

    inputs: Sequence[Ids]
    targets: Sequence[Ids]
    inputs_cut: int
    targets_cut: int
    targets_with_unknown: int
    units: Sequence[tuple[int, ...]] | None = None
    other_inputs: tuple[Sequence[Ids], ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def views(self) -> int:
        """Of each example, itself among them."""
        return 1 + len(self.other_inputs)

    def inputs_of(self, index: int) -> list[Ids]:
        """Of each view of one example, its own first."""
        return [self.inputs[index], *(inputs[index] for inputs in self.other_inputs)]

    def lengths(self, index: int) -> tuple[int, int]:
        """Tokens of one example's target and of the longest of its inputs; nothing is read for it."""
        inputs = (self.inputs, *self.other_inputs)
        return _length(self.targets, index), max(_length(of_view, index) for of_view in inputs)

    def plain(self) -> "EncodedExamples":
        """Without further views."""
        return replace(self, other_inputs=())


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded to one length: input_ids and attention_mask (B, S), labels (B, T) with IGNORED for padding and `UNCOUNTED`
    less the token for what does not count, of which `target_tokens` has none.

    So many rows as `views` says, one after the other, are views of one example. The last `empty` examples count for
    nothing.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor
    target_tokens: int
    views: int = 1
    empty: int = 0

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
    spool: SpoolPlace | None = None,
) -> EncodedExamples:
    """Both sides of each example, its database's schema from `schemas` behind the question; an input that is too long
    loses schema from its end, a target its own end.

    `other_views` are those of each example beside itself. Token ids go to `spool`; raises StorageError where they fit
    neither into memory nor there.
    """
    written = Spool(spool or SpoolPlace(), "the tokens of this silo's lines")
    units = UnitKeys()
    inputs_cut = targets_cut = targets_with_unknown = 0
    of = iter(examples)
    while some := list(islice(of, TOGETHER)):
        inputs = tokenizer.encode(
            [model_input(example.question, schemas[example.db_id] if schemas else None) for example in some]
        )
        views = [tokenizer.encode(list(map(view.input_of, some))) for view in other_views]
        # Without labels no target, not that of an empty text: nothing can be trained on it by mistake.
        of_labels = iter(tokenizer.encode([example.query for example in some if example.query]))
        targets = [next(of_labels) if example.query else [] for example in some]
        inputs_cut += sum(len(ids) > max_input_tokens for ids in inputs)
        targets_cut += sum(len(ids) > max_output_tokens for ids in targets)
        targets_with_unknown += sum(tokenizer.unknown in ids for ids in targets)
        for example, target, *of_views in zip(some, targets, inputs, *views, strict=True):
            units.append(example.unit)
            for ids in of_views:
                written.append(ids_record(tokenizer.cut(ids, max_input_tokens)))
            kept = _without_uncounted(tokenizer, tokenizer.cut(target, max_output_tokens), example)
            written.append(ids_record(kept))
    records, apart = written.finish(), 2 + len(other_views)  # an example's ids lie side by side
    columns = [Stored(records, ids_of, range(first, len(records), apart)) for first in range(apart)]
    return EncodedExamples(
        inputs=columns[0],
        targets=columns[-1],
        inputs_cut=inputs_cut,
        targets_cut=targets_cut,
        targets_with_unknown=targets_with_unknown,
        units=units.units(),
        other_inputs=tuple(columns[1:-1]),
    )


def ids_record(ids: Sequence[int]) -> bytes:
    """Token ids as a spool holds them."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_of(record: bytes) -> Ids:
    return np.frombuffer(record, dtype="<i4")


def _without_uncounted(tokenizer: TextTokenizer, ids: list[int], example: Example) -> list[int]:
    """Tokens count that have a character of `example.counted`, and the end where the token before it does."""
    if example.counted is None or not ids:
        return ids
    places = tokenizer.places(example.query)[: len(ids) - 1]
    counts = [any(begin < stop and start < end for begin, end in example.counted) for start, stop in places]
    counts.append(bool(counts) and counts[-1])
    return [token if counted else UNCOUNTED - token for token, counted in zip(ids, counts, strict=True)]


class Batches(Sequence[list[int]]):
    """Index lists, made when they are asked for."""

    def __init__(self, order: NDArray[np.int64], batch_size: int, turn: NDArray[np.int64] | None = None) -> None:
        """`order` is cut into batches of `batch_size`, the last of which may be shorter; `turn` says which comes when,
        None: one after the other."""
        self._order, self._size, self._turn = order, batch_size, turn

    def __len__(self) -> int:
        return -(-len(self._order) // self._size)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        start = self._size * int(range(len(self))[index] if self._turn is None else self._turn[index])
        indices: list[int] = self._order[start : start + self._size].tolist()
        return indices


def shuffled_batches(
    examples: EncodedExamples, *, batch_size: int, generator: torch.Generator, grouped: int = 1
) -> Batches:
    """Every example once, as index lists of `batch_size` (one may be shorter), in random order; 8 bytes an example.

    Not sorted by length unless that is asked for: questions of one length share a template, so such batches teach one
    template at a time, and the spread of their losses would be taken for loss reduction. `grouped` batches at a time
    are made of examples that are sorted together, and all batches then shuffled.
    """
    order: NDArray[np.int64] = torch.randperm(len(examples), generator=generator).numpy()
    if grouped == 1:
        return Batches(order, batch_size)
    for start in range(0, len(order), grouped * batch_size):
        window = order[start : start + grouped * batch_size]
        window[:] = _by_length(examples, window.tolist())
    batches = Batches(order, batch_size)
    return Batches(order, batch_size, torch.randperm(len(batches), generator=generator).numpy())


def sorted_batches(examples: EncodedExamples, *, chosen: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """`chosen` in batches of similar length, longest first, so that memory runs out at once or not at all."""
    ordered = _by_length(examples, chosen)
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


def _by_length(examples: EncodedExamples, chosen: Iterable[int]) -> list[int]:
    def key(index: int) -> tuple[int, int]:
        return _length(examples.targets, index), _length(examples.inputs, index)

    return sorted(chosen, key=key, reverse=True)


def _length(rows: Sequence[Ids], index: int) -> int:
    """Tokens of one row; of one that is stored, nothing is read for it."""
    return rows.stored_bytes(index) // 4 if isinstance(rows, Stored) else len(rows[index])


def _padded(rows: Sequence[Ids], filler: int, least: int) -> NDArray[np.int64]:
    padded = np.full((len(rows), max(least, *map(len, rows))), filler, dtype=np.int64)
    for row, ids in zip(padded, rows, strict=True):
        row[: len(ids)] = ids
    return padded
