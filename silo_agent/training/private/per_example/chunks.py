"""Which examples are computed together: those of one shape, and only as many as change no bit of what each has alone.

What an example adds to a private sum may not depend on which others were drawn: with weights that somebody chose,
another rounding of the last bit, or padding that attention sees after all, changes a loss or a gradient by as much as
he likes. So an example is padded by its own lengths alone, and a chunk is as large as this processor, with these
numbers of threads, rows and columns, was found to give every row the bits that it gives it alone. That is tried out on
numbers drawn here: how a product of matrices is cut into pieces depends on its sizes, never on its numbers;
activations, of which that is not true, are apart (own_activations.py). Where it fails, as it does for the shortest
examples, each is computed alone. Views of one example (views.py) are padded alike and always computed together: what is
said here of an example's row holds of all of its rows.

A GPU takes other kernels for one row than for many, and as long for one as for many. So where its chunks fail, each
chunk of a shape has one size, however few examples were drawn, and empty ones fill it up. That size was tried out as
well: wherever a row stands in it, and whatever stands beside it, it has the same bits. Then even one example of a shape
takes the room of a whole chunk, so that room for the longest there can be is taken first: that memory runs out is to
follow from the plan, and not from one record.
"""

import copy
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from silo_agent.training.data.batches import IGNORED, Batch, EncodedExamples, collate
from silo_agent.training.model.model import T5
from silo_agent.training.private.per_example.batched_bias import batched_bias
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.private.per_example.ghost_norms import ExampleGradients
from silo_wire.model_folders.t5_config import model_class

SOURCE_STEP, TARGET_STEP = 16, 8
"""Tokens; lengths are padded to multiples of these."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What the lengths of an example are padded to."""

    target: int
    source: int


def shape_of(examples: EncodedExamples, index: int) -> Shape:
    """By the longest of its views."""
    target, source = examples.lengths(index)
    return Shape(_rounded_up(target, TARGET_STEP), _rounded_up(source, SOURCE_STEP))


class Chunks:
    """Of at most `most` rows, or the views of one example, computed by `model` on its device.

    `whole`: whether chunks may be filled up where that saves launches. Processes that share a sum may not: one whose
    processor finds otherwise would add other bits.
    """

    def __init__(self, model: T5, *, most: int, whole: bool = True) -> None:
        self._trials = _Trials(model)
        self._pad: int = model.config.pad_token_id
        self._device = next(model.parameters()).device
        self._most = most
        self._whole = whole and launches_are_what_takes_time(self._device)
        self._sizes = [1]
        while 2 * self._sizes[-1] <= most:
            self._sizes.append(2 * self._sizes[-1])

    def of(self, examples: EncodedExamples, indices: Sequence[int]) -> Iterator[tuple[list[int], Batch]]:
        """All of `indices`, each as often as it is there: the longest first, so that memory runs out at once or not at
        all."""
        by_shape: dict[Shape, array[int]] = {}  # of 8 bytes each: these may be all examples that there are
        for index in indices:
            by_shape.setdefault(shape_of(examples, index), array("q")).append(index)
        for shape, left in sorted(by_shape.items(), reverse=True):
            whole = self._whole_size(shape, examples.views)
            start = 0
            while start < len(left):
                size = whole or next(
                    size
                    for size in reversed(self._sizes)
                    if size <= len(left) - start and self._alike(shape, size, examples.views)
                )
                some = left[start : start + size].tolist()
                yield some, filled(padded(examples, some, shape, pad=self._pad, device=self._device), whole, self._pad)
                start += size

    def longest(self, *, source: int, target: int, views: int) -> Batch | None:
        """As many examples as a chunk may have, of texts of so many tokens at most, and nothing in them; None where no
        chunk is filled up. They are computed as others are, and take as much room."""
        if not self._whole:
            return None
        shape = Shape(_rounded_up(target, TARGET_STEP), _rounded_up(source, SOURCE_STEP))
        size = self._whole_size(shape, views) or max([1, *self._sizes_above_one(views)])
        nobody = Batch(
            torch.zeros(0, shape.source, dtype=torch.int64, device=self._device),
            torch.zeros(0, shape.source, dtype=torch.bool, device=self._device),
            torch.zeros(0, shape.target, dtype=torch.int64, device=self._device),
            0,
            views,
        )
        return replace(filled(nobody, size, self._pad), empty=0)

    def _alike(self, shape: Shape, size: int, views: int) -> bool:
        return size == 1 or (size * views <= self._most and self._trials.rows_keep_their_bits(shape, size, views))

    def _whole_size(self, shape: Shape, views: int) -> int:
        """Examples of every chunk of `shape`; 0 where they need not be as many. It follows from the shape alone: that
        there are few of them, or many, is not to change what any of them adds."""
        sizes = self._sizes_above_one(views) if self._whole else []
        if not sizes or self._alike(shape, sizes[0], views):
            return 0
        return next((size for size in sizes if self._trials.places_keep_bits(shape, size, views)), 0)

    def _sizes_above_one(self, views: int) -> list[int]:
        """That `most` rows are enough for, the largest first."""
        return [size for size in reversed(self._sizes) if size > 1 and size * views <= self._most]


def launches_are_what_takes_time(device: torch.device) -> bool:
    """Rather than arithmetic, so that a row that counts for nothing costs next to nothing."""
    return device.type != "cpu"


def padded(examples: EncodedExamples, indices: Sequence[int], shape: Shape, *, pad: int, device: torch.device) -> Batch:
    return collate(examples, indices, pad=pad, device=device, source=shape.source, target=shape.target)


def filled(batch: Batch, examples: int, pad: int) -> Batch:
    """With empty examples up to `examples`: each has a token of padding to read and no target, so it has no loss and no
    gradient."""
    missing = max(0, examples - batch.examples)
    if not missing:
        return batch
    shape = (missing * batch.views,)
    mask = batch.attention_mask.new_zeros(shape + batch.attention_mask.shape[1:])
    mask[:, 0] = True
    return Batch(
        input_ids=torch.cat([batch.input_ids, batch.input_ids.new_full(shape + batch.input_ids.shape[1:], pad)]),
        attention_mask=torch.cat([batch.attention_mask, mask]),
        labels=torch.cat([batch.labels, batch.labels.new_full(shape + batch.labels.shape[1:], IGNORED)]),
        target_tokens=batch.target_tokens,
        views=batch.views,
        empty=missing,
    )


def unpadded(batch: Batch, index: int) -> Batch:
    """One example of a batch, shape (1, ...), without padding."""
    mask = batch.attention_mask[index : index + 1]
    labels = batch.labels[index : index + 1]
    source = max(1, int(mask.sum()))
    target = max(1, int((labels != IGNORED).sum()))
    return Batch(
        input_ids=batch.input_ids[index : index + 1, :source],
        attention_mask=mask[:, :source],
        labels=labels[:, :target],
        target_tokens=target,
    )


class _Trials:
    """For models of one structure."""

    def __init__(self, model: T5) -> None:
        blocks = [model.encoder.block[0], model.decoder.block[0]]
        layers = tuple(
            (name, type(module).__name__, tuple(tuple(one.shape) for one in module.parameters(recurse=False)))
            for block in blocks
            for name, module in block.named_modules()
        )
        trained = tuple(
            parameter.requires_grad
            for part in (*blocks, model.shared, model.lm_head)
            for parameter in part.parameters()
        )
        self._structure = (model.config.to_json_string(), layers, trained)
        self._like = model
        self._device = next(model.parameters()).device
        self._made: T5 | None = None

    def rows_keep_their_bits(self, shape: Shape, size: int, views: int) -> bool:
        """Whether `size` examples of `shape`, of so many `views` each, have in one batch, to the last bit, the losses
        and gradients that each has alone."""
        return self._holds(_as_alone, shape, size, views)

    def places_keep_bits(self, shape: Shape, size: int, views: int) -> bool:
        """Whether every batch of `size` examples gives each of them the same losses and gradients, to the last bit."""
        return self._holds(_wherever, shape, size, views)

    def _holds(self, trial: "_Trial", shape: Shape, size: int, views: int) -> bool:
        key = (trial, self._structure, shape, size, views, self._device, *_ways_of_torch())
        if key not in _FOUND:
            generator = torch.Generator().manual_seed(size)
            with torch.inference_mode(False), torch.enable_grad():
                drawn = (_drawn(self._like, shape, size, views, full, generator) for full in (True, False))
                _FOUND[key] = all(trial(model, batch) for batch in drawn for model in self._models())
        return _FOUND[key]

    def _models(self) -> Iterator[T5]:
        """The one of `_model` as its first block is, into which nothing comes that needs a gradient where words are
        frozen, and as every other block is."""
        model = self._model()
        for trained in sorted({self._like.shared.weight.requires_grad, True}):
            model.shared.weight.requires_grad_(trained)
            yield model

    def _model(self) -> T5:
        """With one layer on either side, which holds every size there is, and random weights: those of the model may
        hide a difference."""
        if self._made is None:
            config = copy.deepcopy(self._like.config)
            config.num_layers = config.num_decoder_layers = 1
            made: Any = model_class(config)(config)
            for ours, theirs in ((made.encoder, self._like.encoder), (made.decoder, self._like.decoder)):
                ours.block[0] = copy.deepcopy(theirs.block[0])
            made.shared.weight.requires_grad_(self._like.shared.weight.requires_grad)
            made.lm_head.weight.requires_grad_(self._like.lm_head.weight.requires_grad)
            for module in made.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for parameter in made.parameters():
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn * (1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5))
            self._made = made.to(self._device).train()
        return self._made


_FOUND: dict[tuple[object, ...], bool] = {}


_Trial = Callable[[T5, Batch], bool]


def _ways_of_torch() -> tuple[object, ...]:
    """What else decides by which kernel a product is computed."""
    cuda: Any = torch.backends.cuda
    return (
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
    )


def _drawn(model: T5, shape: Shape, size: int, views: int, full: bool, generator: torch.Generator) -> Batch:
    """Texts of all lengths, of which every other one is as long as it may be; `full`: all are. A batch without any
    padding has no mask, and is computed otherwise than one that has a single token of it."""
    vocabulary: int = model.config.vocab_size
    rows, device = size * views, next(model.parameters()).device
    ids = torch.randint(0, vocabulary, (rows, shape.source), generator=generator)
    labels = torch.randint(0, vocabulary, (rows, shape.target), generator=generator)
    sources = torch.randint(1, shape.source + 1, (rows, 1), generator=generator)
    targets = torch.randint(1, shape.target + 1, (rows, 1), generator=generator)
    longest = torch.ones(rows, 1, dtype=torch.bool) if full else torch.arange(rows)[:, None] // views % 2 == 0
    sources[longest], targets[longest] = shape.source, shape.target
    if not full:
        sources[-1] = min(int(sources[-1]), max(1, shape.source - 1))
    mask = torch.arange(shape.source) < sources
    labels[torch.arange(shape.target) >= targets] = IGNORED
    return Batch(ids.to(device), mask.to(device), labels.to(device), 0, views)


def _as_alone(model: T5, batch: Batch) -> bool:
    whole = _results(model, batch)
    for example in range(batch.examples):
        alone = _results(model, batch.rows_of(example, example + 1))
        if not all(
            torch.equal(either[example : example + 1], other) for either, other in zip(whole, alone, strict=True)
        ):
            return False
    return True


def _wherever(model: T5, batch: Batch) -> bool:
    """Every other example is moved on by 1, 2, 4, ... places, so that each place is compared with another, with empty
    examples in place of the rest."""
    size, whole = batch.examples, _results(model, batch)
    kept = list(range(0, size, 2))
    step = 1
    while step < size:
        places = [(place + step) % size for place in kept]
        moved = _results(model, _at_places(batch, kept, places, model.config.pad_token_id))
        if not all(torch.equal(either[kept], other[places]) for either, other in zip(whole, moved, strict=True)):
            return False
        step *= 2
    return True


def _at_places(batch: Batch, kept: Sequence[int], places: Sequence[int], pad: int) -> Batch:
    """As many examples, of which those `kept` stand at `places` and the rest are empty."""
    made = filled(batch.rows_of(0, 0), batch.examples, pad)
    for ours, theirs in (
        (made.input_ids, batch.input_ids),
        (made.attention_mask, batch.attention_mask),
        (made.labels, batch.labels),
    ):
        ours.view(batch.examples, -1)[places] = theirs.view(batch.examples, -1)[kept]
    return made


def _results(model: T5, batch: Batch) -> list[torch.Tensor]:
    """Losses in training and in evaluation, and for each use of a trained weight what entered and the gradient of what
    left; example by example."""
    gradients = ExampleGradients(batch.examples, batch.labels.device, views=batch.views)
    with gradients.recording(model), batched_bias(model, len(batch.labels)):
        losses = example_losses(model, batch)
    gradients.backward(losses)
    model.eval()
    with torch.inference_mode():
        evaluated = example_losses(model, batch)
    model.train()
    of_views = [made.view(batch.examples, batch.views) for made in (losses.detach(), evaluated)]
    return [*of_views, *(part for use in gradients.uses for part in (use.entered, use.gradient))]


def _rounded_up(length: int, step: int) -> int:
    return max(step, -(-length // step) * step)
