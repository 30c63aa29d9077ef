"""A silo's part of one step that several silos take together: the sum of clipped gradients of a Poisson sample, without
noise.

Noise comes under the mask, a part of it from each silo
(security/lorica_security/secure_aggregation/masked_vectors/noise_shares.py). There is no local optimizer: the server's
takes the step. What is kept is minus the sum over the plan's expected batch size, coordinate by coordinate cut to the
plan's range, and rounded to whole parts of it. To cut each coordinate is a projection, and brings two sums no further
apart; to scale a long sum down would not be one where its length is not exact.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lorica_security.noise.random_words import RandomWords
from lorica_security.secure_aggregation.masked_vectors.fixed_point import WholeBlock
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.model.model import T5
from silo_agent.training.model.vector_file import new_vector_file
from silo_agent.training.private.clipping import Backend, clipping
from silo_agent.training.private.per_example.chunks import Chunks
from silo_agent.training.private.per_example.ghost_norms import check_covered
from silo_agent.training.private.private_trainer import PrivateSchedule, drawn_examples, require_no_dropout, take_room
from silo_agent.training.update.client_update import WrittenUpdate, finished
from silo_wire.manifest import Layout
from silo_wire.plans.noised_masks import GRADIENT_STEPS
from silo_wire.plans.sections.training import TrainingSection

_BLOCK = 1 << 20


def sum_gradients(
    model: T5,
    parameters: Sequence[nn.Parameter],
    examples: EncodedExamples,
    schedule: PrivateSchedule,
    section: TrainingSection,
    *,
    backend: Backend,
    words: RandomWords,
    should_stop: Callable[[], bool],
) -> None:
    """Leave the float64 sum of clipped gradients of a fresh sample in `summed_grad` of each of `parameters`; None where
    none was drawn.

    `words` is a stream of this sum's own. `section.batch_size` examples are in memory at a time at most. Raises as
    `train_privately`.
    """
    require_no_dropout(model)
    check_covered(model)
    chunks = Chunks(model, most=section.batch_size)
    way = clipping(backend, model, parameters, max_grad_norm=schedule.max_grad_norm)
    model.train()
    take_room(way, chunks, section, views=examples.views)
    for _, batch in chunks.of(examples, drawn_examples(examples, schedule.sampling_rate, words)):
        if should_stop():
            raise TrainingStopped
        way.accumulate(batch)


def write_sum(
    path: Path, layout: Layout, sums: Sequence[torch.Tensor | None], *, divisor: float, bound: float
) -> WrittenUpdate:
    """Write minus `sums` over `divisor`, cut to `bound`, to `path`: int32, of which GRADIENT_STEPS stand for `bound`.

    `sums` are of the tensors of `layout`, in its order, None for zeros. Raises StorageError; after an error there is no
    file.
    """
    with new_vector_file(path) as writer:
        for spec, summed in zip(layout.tensors, sums, strict=True):
            for block in _blocks(spec.elements, summed):
                np.multiply(block, -GRADIENT_STEPS / (divisor * bound), out=block)
                np.clip(block, -GRADIENT_STEPS, GRADIENT_STEPS, out=block)
                whole: WholeBlock = np.rint(block).astype("<i4")
                writer.write(whole.view("<u4"))
        return finished(writer, path, layout)


def take_sums(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    """What `sum_gradients` left, which is then left no more."""
    sums: list[torch.Tensor | None] = []
    for parameter in parameters:
        holder: Any = parameter
        sums.append(getattr(holder, "summed_grad", None))
        holder.summed_grad = None
    return sums


def _blocks(elements: int, summed: torch.Tensor | None) -> Iterator[np.ndarray[Any, np.dtype[np.float64]]]:
    flat = None if summed is None else summed.detach().reshape(-1)
    for begin in range(0, elements, _BLOCK):
        end = min(begin + _BLOCK, elements)
        if flat is None:
            yield np.zeros(end - begin)
        else:
            yield flat[begin:end].cpu().numpy().copy()
