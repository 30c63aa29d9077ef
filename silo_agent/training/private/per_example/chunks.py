"""Which examples are computed together: those of one shape, and only as many as change no bit of what each has alone.

What an example adds to a private sum may not depend on which others were drawn: with weights that somebody chose,
another rounding of the last bit, or padding that attention sees after all, changes a loss or a gradient by as much as
he likes. So an example is padded by its own lengths alone, and a chunk is as large as this processor, with these
numbers of threads, rows and columns, was found to give every row the bits that it gives it alone. That is tried out on
numbers drawn here: how a product of matrices is cut into pieces depends on its sizes, never on its numbers;
activations, of which that is not true, are apart (own_activations.py). Where it fails, as it does for the shortest
examples, each is computed alone. Views of one example (views.py) are padded alike and always computed together: what is
said here of an example's row holds of all of its rows.
"""

import copy
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
_TRIALS = 2


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
    """Of at most `most` rows, or the views of one example, computed by `model` on its device."""

    def __init__(self, model: T5, *, most: int) -> None:
        self._trials = _Trials(model)
        self._pad: int = model.config.pad_token_id
        self._device = next(model.parameters()).device
        self._most = most
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
            start = 0
            while start < len(left):
                size = next(
                    size
                    for size in reversed(self._sizes)
                    if size <= len(left) - start and self._alike(shape, size, examples.views)
                )
                some = left[start : start + size].tolist()
                yield some, padded(examples, some, shape, pad=self._pad, device=self._device)
                start += size

    def _alike(self, shape: Shape, size: int, views: int) -> bool:
        return size == 1 or (size * views <= self._most and self._trials.rows_keep_their_bits(shape, size, views))


def padded(examples: EncodedExamples, indices: Sequence[int], shape: Shape, *, pad: int, device: torch.device) -> Batch:
    return collate(examples, indices, pad=pad, device=device, source=shape.source, target=shape.target)


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
        key = (self._structure, shape, size, views, self._device, torch.get_num_threads())
        if key not in _FOUND:
            generator = torch.Generator().manual_seed(size)
            with torch.inference_mode(False), torch.enable_grad():
                tried = (_trial(self._model(), shape, size, views, self._device, generator) for _ in range(_TRIALS))
                _FOUND[key] = all(tried)
        return _FOUND[key]

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


def _trial(model: T5, shape: Shape, size: int, views: int, device: torch.device, generator: torch.Generator) -> bool:
    vocabulary: int = model.config.vocab_size
    rows = size * views
    ids = torch.randint(0, vocabulary, (rows, shape.source), generator=generator)
    labels = torch.randint(0, vocabulary, (rows, shape.target), generator=generator)
    sources = torch.randint(1, shape.source + 1, (rows, 1), generator=generator)
    targets = torch.randint(1, shape.target + 1, (rows, 1), generator=generator)
    mask = torch.arange(shape.source) < sources
    labels[torch.arange(shape.target) >= targets] = IGNORED
    batch = Batch(ids.to(device), mask.to(device), labels.to(device), 0, views)
    whole = _results(model, batch)
    for example in range(size):
        alone = _results(model, batch.rows_of(example, example + 1))
        if not all(
            torch.equal(either[example : example + 1], other) for either, other in zip(whole, alone, strict=True)
        ):
            return False
    return True


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
