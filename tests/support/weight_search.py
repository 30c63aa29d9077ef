"""A search for weights and records with which one record counts for more than private training promises.

It drives `train_privately` for one step on two neighbouring data sets, and looks at what noise is added to: how far
apart the two sums of clipped gradients are, over max_grad_norm, and the two sums of losses, over the bound. It knows no
attack, and goes where a norm is a little wrong, or where two records together are a little more than each alone:
rounding is there from the beginning, and what makes it larger is kept. A candidate is a small T5 of either make, its
weights, records, views of them, clipping norm, bound and batch size, and whether chunks are filled up as on a GPU; it
is changed by scaling tensors, rows, columns and single numbers over the whole range of float32, by a step along the
gradient of the one record's loss against the others', by sharpening attention and by bringing its scores to the edges
of float32, by other lengths, words and copies of records, and by more or fewer views.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration

from lorica_security.errors import StateError
from lorica_security.noise.random_words import RandomWords
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.private import private_trainer
from silo_agent.training.private.clipping import MARGIN
from silo_agent.training.private.loss_sums import GRID
from silo_agent.training.private.private_optimizer import PrivateOptimizer
from silo_agent.training.private.private_trainer import PrivateSchedule, train_privately
from silo_wire.plans.sections.training import TrainingSection
from tests.support.as_on_a_gpu import as_on_a_gpu

VOCABULARY = 24
MOST_TOKENS = 40
MOST_RECORDS = 6
MOST_VIEWS = 4
SPARED = 4
"""Records of which the first so many stay as they are: an audit of the first few would see nothing."""
_LARGEST = 3e38
_KEPT = 5
"""Candidates that are changed further."""

Row = np.ndarray[tuple[int], np.dtype[np.int32]]
Record = tuple[Row, ...]
"""Source and target, then what further views have for a source: whatever they say, they are of one record."""
Random = np.random.Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """`records` are token ids, the last of which one data set has and the other not; of their views the first so many
    count."""

    model: T5ForConditionalGeneration
    records: tuple[Record, ...]
    max_grad_norm: float
    loss_bound: float
    batch_size: int
    views: int = 1
    whole_chunks: bool = False
    told: tuple[str, ...] = ()  # how it was made, for people


@dataclass(frozen=True, slots=True)
class Moved:
    """How far one record moves the sum of gradients, over max_grad_norm, and that of losses, over the bound.

    The others are what leads there: how wrong the norm of the record's gradient was, as a part of it, and how much more
    than the record adds alone the two sums moved. A product that keeps its promise has next to nothing of either.
    """

    gradients: float
    losses: float
    wrong_norm: float = 0.0
    more_gradients: float = 0.0
    more_losses: float = 0.0

    @property
    def signs(self) -> tuple[float, float, float]:
        return self.wrong_norm, self.more_gradients, self.more_losses


@dataclass(slots=True)
class Found:
    """The worst candidate for each of the two, how many were tried, and how many of these had more views than one, or
    whole chunks."""

    tried: int = 0
    with_views: int = 0
    with_whole_chunks: int = 0
    gradients: tuple[float, Candidate | None] = (0.0, None)
    losses: tuple[float, Candidate | None] = (0.0, None)
    kept: list[list[tuple[float, Candidate]]] = field(default_factory=lambda: [[], [], []])
    """Of each sign those that have most of it."""


def search(seed: int, candidates: int, *, until: Callable[[Found], bool] = lambda found: False) -> Found:
    """Try so many candidates, or fewer where `until` is met."""
    random, found = np.random.default_rng(seed), Found()
    while found.tried < candidates and not until(found):
        of_one_sign = found.kept[int(random.integers(3))]
        fresh = not of_one_sign or random.random() < 0.2
        parent = _fresh(random) if fresh else of_one_sign[int(random.integers(len(of_one_sign)))][1]
        candidate = _changed(parent, random, int(random.integers(1, 7 if fresh else 4)))
        moved = moved_by_one(candidate)
        found.tried += 1
        found.with_views += candidate.views > 1
        found.with_whole_chunks += candidate.whole_chunks
        if moved.gradients > found.gradients[0]:
            found.gradients = moved.gradients, candidate
        if moved.losses > found.losses[0]:
            found.losses = moved.losses, candidate
        for sign, kept in zip(moved.signs, found.kept, strict=True):
            if sign > 0.0:
                kept.append((sign, candidate))
                kept.sort(key=lambda one: -one[0])
                del kept[_KEPT:]
    return found


def moved_by_one(candidate: Candidate) -> Moved:
    records = candidate.records
    whole, fewer, alone = (_sums(candidate, some) for some in (records, records[:-1], records[-1:]))
    if whole is None or fewer is None or alone is None:
        return Moved(0.0, 0.0)

    def length(of: torch.Tensor) -> float:
        norm = float(of.norm()) / candidate.max_grad_norm
        return norm if math.isfinite(norm) else math.inf

    own = length(alone[0]) / (1 - MARGIN)
    return Moved(
        gradients=length(whole[0] - fewer[0]),
        losses=abs(whole[1] - fewer[1]) / GRID,
        wrong_norm=abs(own - 1.0) if own > 0.5 else 0.0,  # shorter ones are not cut
        more_gradients=length(whole[0] - fewer[0] - alone[0]),
        more_losses=abs(whole[1] - fewer[1] - alone[1]) / GRID,
    )


def _sums(candidate: Candidate, records: tuple[Record, ...]) -> tuple[torch.Tensor, int] | None:
    """What noise is added to: the flat sum of gradients, and the loss before training in steps of the bound / 65536."""
    model = candidate.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with _tapped(parameters) as tape, as_on_a_gpu() if candidate.whole_chunks else nullcontext():
        try:
            train_privately(
                model,
                parameters,
                EncodedExamples(
                    inputs=tuple(record[0] for record in records),
                    targets=tuple(record[1] for record in records),
                    other_inputs=tuple(
                        tuple(record[1 + view] for record in records) for view in range(1, candidate.views)
                    ),
                    inputs_cut=0,
                    targets_cut=0,
                    targets_with_unknown=0,
                ),
                TrainingSection(
                    optimizer="adamw",
                    learning_rate=1e-3,
                    batch_size=candidate.batch_size,
                    max_grad_norm=candidate.max_grad_norm,
                ),
                PrivateSchedule(
                    sampling_rate=1.0,
                    steps=1,
                    expected_batch_size=4,
                    noise_multiplier=1.0,
                    max_grad_norm=candidate.max_grad_norm,
                    loss_bound=candidate.loss_bound,
                    loss_noise_multiplier=1.0,
                    weight_cap=1e6,
                ),
                backend="ghost",
                words=RandomWords(bytes(32)),
                on_progress=lambda fraction: None,
                should_stop=lambda: False,
            )
        except _Seen:
            return torch.cat([part.double().flatten() for part in tape["gradients"]]), tape["losses"]
        except StateError:  # what is refused moves nothing
            return None
    raise AssertionError("a step adds noise")


class _Seen(Exception):
    """Nothing that comes after depends on more than the sums and noise."""


@contextmanager
def _tapped(parameters: list[torch.nn.Parameter]) -> Iterator[dict[str, Any]]:
    tape: dict[str, Any] = {}
    loss_sum = private_trainer.loss_sum

    def of_gradients(optimizer: PrivateOptimizer) -> None:
        sums = [parameter.summed_grad for parameter in parameters]  # type: ignore[attr-defined]
        tape["gradients"] = [
            torch.zeros_like(parameter) if one is None else one.detach().clone()
            for parameter, one in zip(parameters, sums, strict=True)
        ]
        raise _Seen

    def of_losses(*of: Any, **settings: Any) -> int:
        tape["losses"] = loss_sum(*of, **settings)
        return int(tape["losses"])

    with (
        patch.object(PrivateOptimizer, "add_noise", of_gradients),
        patch.object(private_trainer, "loss_sum", of_losses),
    ):
        yield tape


# --- candidates


def small_t5(seed: int, *, gated: bool, tied: bool, width: int = 8, d_ff: int = 12) -> T5ForConditionalGeneration:
    """One layer on either side, two heads."""
    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=width,
        d_kv=width // 2,
        d_ff=d_ff,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu" if gated else "relu",
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model


def _fresh(random: Random) -> Candidate:
    seed = int(random.integers(1 << 31))
    model = small_t5(seed, gated=random.random() < 0.4, tied=random.random() >= 0.5)
    if random.random() < 0.15:
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["q", "v", "wo"]), model)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.1)
    count = int(random.integers(SPARED + 1, MOST_RECORDS + 1))
    return Candidate(
        model=model,
        records=tuple(_record(random) for _ in range(count)),
        max_grad_norm=float(10 ** random.uniform(-12, random.choice([-10, 6]))),
        loss_bound=float(10 ** random.uniform(-3, 3)),
        batch_size=int(random.choice([1, 2, 4, 8, 16])),
        views=_views(random),
        whole_chunks=seed % 2 == 0,
    )


def _views(random: Random) -> int:
    return int(random.choice([1, 1, *range(2, MOST_VIEWS + 1)]))


def _record(random: Random) -> Record:
    def row() -> Row:
        most = int(random.choice([1, 8, MOST_TOKENS]))
        return random.integers(2, VOCABULARY, int(random.integers(1, most + 1))).astype(np.int32)

    return tuple(row() for _ in range(1 + MOST_VIEWS))


def _changed(parent: Candidate, random: Random, times: int) -> Candidate:
    changed = replace(parent, model=copy.deepcopy(parent.model))
    for _ in range(times):
        change = _CHANGES[int(random.integers(len(_CHANGES)))]
        with torch.no_grad():
            changed = change(changed, random)
        changed = replace(changed, told=(*changed.told, change.__name__.strip("_")))
    return changed


def _factor(random: Random) -> float:
    reach = random.choice([0.5, 3.0, 12.0, 25.0])
    return float(random.choice([-1, 1]) * 10 ** random.uniform(-reach, reach))


def _tensor(candidate: Candidate, random: Random) -> torch.Tensor:
    parameters = list(candidate.model.parameters())
    return parameters[int(random.integers(len(parameters)))]


def _bounded(tensor: torch.Tensor) -> None:
    tensor.nan_to_num_(nan=0.0, posinf=_LARGEST, neginf=-_LARGEST)


def _scale_a_tensor(candidate: Candidate, random: Random) -> Candidate:
    tensor = _tensor(candidate, random)
    tensor.mul_(_factor(random))
    _bounded(tensor)
    return candidate


def _scale_a_row(candidate: Candidate, random: Random) -> Candidate:
    tensor = _tensor(candidate, random)
    part = tensor[int(random.integers(tensor.shape[0]))]
    part.mul_(_factor(random))
    _bounded(tensor)
    return candidate


def _scale_a_column(candidate: Candidate, random: Random) -> Candidate:
    tensor = _tensor(candidate, random)
    part = tensor[..., int(random.integers(tensor.shape[-1]))]
    part.mul_(_factor(random))
    _bounded(tensor)
    return candidate


def _scale_a_word(candidate: Candidate, random: Random) -> Candidate:
    """What the one record has and the others, perhaps, not."""
    sides = candidate.records[-1][: 1 + candidate.views]
    words = sides[int(random.integers(len(sides)))]
    word = int(words[int(random.integers(len(words)))])
    table = candidate.model.shared.weight if random.random() < 0.5 else candidate.model.lm_head.weight
    table[word] *= _factor(random)
    _bounded(table)
    return candidate


def _set_a_number(candidate: Candidate, random: Random) -> Candidate:
    tensor = _tensor(candidate, random).view(-1)
    tensor[int(random.integers(len(tensor)))] = _factor(random)
    return candidate


def _draw_anew(candidate: Candidate, random: Random) -> Candidate:
    tensor = _tensor(candidate, random)
    tensor.copy_(torch.from_numpy(random.standard_normal(tuple(tensor.shape))).float() * abs(_factor(random)))
    _bounded(tensor)
    return candidate


def _sharpen_attention(candidate: Candidate, random: Random) -> Candidate:
    names = ["SelfAttention", "EncDecAttention"]
    chosen = [module for name, module in candidate.model.named_modules() if name.rpartition(".")[2] in names]
    module: Any = chosen[int(random.integers(len(chosen)))]
    factor = abs(_factor(random))
    for projection in (module.q, module.k):
        weight = getattr(projection, "base_layer", projection).weight
        weight.mul_(factor)
        _bounded(weight)
    return candidate


def _scores_at_an_edge(candidate: Candidate, random: Random) -> Candidate:
    """Attention whose largest scores are near what float32 can just hold, at the top or at the bottom, or near 1."""
    names = ["SelfAttention", "EncDecAttention"]
    chosen = [module for name, module in candidate.model.named_modules() if name.rpartition(".")[2] in names]
    module: Any = chosen[int(random.integers(len(chosen)))]
    largest = {module.q: 0.0, module.k: 0.0}

    def note(projection: torch.nn.Module, _: object, made: torch.Tensor) -> None:
        largest[projection] = max(largest[projection], float(made.abs().nan_to_num(0.0, 0.0, 0.0).max()))

    hooks = [projection.register_forward_hook(note) for projection in largest]
    for source, target, *_ in candidate.records:
        candidate.model(
            input_ids=torch.from_numpy(source.astype(np.int64))[None],
            labels=torch.from_numpy(target.astype(np.int64))[None],
        )
    for hook in hooks:
        hook.remove()
    scores = math.log10(max(largest[module.q], 1e-300)) + math.log10(max(largest[module.k], 1e-300))
    edge = random.choice([math.log10(_LARGEST), -38.0, 0.0]) + random.uniform(-2.0, 1.0)
    factor = 10 ** float(np.clip((edge - scores) / 2, -150, 150))
    for projection in (module.q, module.k):
        weight = getattr(projection, "base_layer", projection).weight
        weight.copy_((weight.double() * factor).clamp(-_LARGEST, _LARGEST).float())
    return candidate


def _follow_the_gradient(candidate: Candidate, random: Random) -> Candidate:
    """Such that the one record's loss grows beside the others', or falls."""
    model = candidate.model
    with torch.enable_grad():
        losses = []
        for source, target, *_ in candidate.records:
            logits = model(
                input_ids=torch.from_numpy(source.astype(np.int64))[None],
                labels=torch.from_numpy(target.astype(np.int64))[None],
            ).logits
            losses.append(functional.cross_entropy(logits[0], torch.from_numpy(target.astype(np.int64))))
        wanted = losses[-1] - torch.stack(losses[:-1]).mean()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(wanted, trained, allow_unused=True)
    rate = random.choice([-1, 1]) * 10 ** random.uniform(-3, 1)
    for parameter, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            size = parameter.abs().mean()
            parameter.add_(gradient.nan_to_num(0.0, 0.0, 0.0).sign() * size * float(rate))
            _bounded(parameter)
    return candidate


def _another_clipping_norm(candidate: Candidate, random: Random) -> Candidate:
    return replace(
        candidate, max_grad_norm=float(np.clip(candidate.max_grad_norm * 10 ** random.uniform(-6, 6), 1e-12, 1e6))
    )


def _another_bound(candidate: Candidate, random: Random) -> Candidate:
    return replace(candidate, loss_bound=float(np.clip(candidate.loss_bound * 10 ** random.uniform(-2, 2), 1e-3, 1e3)))


def _another_batch_size(candidate: Candidate, random: Random) -> Candidate:
    return replace(candidate, batch_size=int(random.choice([1, 2, 4, 8, 16])))


def _another_number_of_views(candidate: Candidate, random: Random) -> Candidate:
    return replace(candidate, views=_views(random))


def _views_that_are_alike(candidate: Candidate, random: Random) -> Candidate:
    """Of the one record, so that their gradients point one way."""
    source, target, *_ = candidate.records[-1]
    return replace(candidate, records=(*candidate.records[:-1], (source, target, *[source] * (MOST_VIEWS - 1))))


def _another_record(candidate: Candidate, random: Random) -> Candidate:
    records = list(candidate.records)
    records[int(random.integers(len(records)))] = _record(random)
    return replace(candidate, records=tuple(records))


def _copies_of_a_record(candidate: Candidate, random: Random) -> Candidate:
    """What happens to one happens to all of them."""
    copied = candidate.records[int(random.integers(len(candidate.records)))]
    others = [copied] * int(random.integers(1, 6))
    kept = candidate.records[:SPARED]
    return replace(candidate, records=(*kept, *others, candidate.records[-1])[:MOST_RECORDS])


def _another_last_record(candidate: Candidate, random: Random) -> Candidate:
    return replace(candidate, records=(*candidate.records[:-1], _record(random)))


_CHANGES: tuple[Callable[[Candidate, Random], Candidate], ...] = (
    _scale_a_tensor,
    _scale_a_tensor,
    _scale_a_row,
    _scale_a_column,
    _scale_a_word,
    _set_a_number,
    _draw_anew,
    _sharpen_attention,
    _scores_at_an_edge,
    _follow_the_gradient,
    _another_clipping_norm,
    _another_bound,
    _another_batch_size,
    _another_number_of_views,
    _views_that_are_alike,
    _another_record,
    _copies_of_a_record,
    _another_last_record,
)
