"""No model, whatever its weights, makes one record count for more than max_grad_norm, or its loss for more than
loss_bound.

`make weight-search WEIGHTS=3000` looks further than this slice: that many candidates for each of three seeds, and that
the search finds each of three ways to break the product, planted here, among at most three times as many.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import T5ForConditionalGeneration

from lorica_security.noise.random_words import RandomWords
from silo_agent.training.data.batches import Batch, EncodedExamples, collate, sorted_batches
from silo_agent.training.private.clipping import Backend, Ghost, clipping
from silo_agent.training.private.joint_gradient import sum_gradients
from silo_agent.training.private.loss_sums import loss_sum
from silo_agent.training.private.per_example import chunks, ghost_norms
from silo_agent.training.private.per_example.batched_bias import batched_bias
from silo_agent.training.private.per_example.chunks import Chunks, Shape, padded, shape_of
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.private.per_example.ghost_norms import ExampleGradients, Use
from silo_wire.plans.sections.training import TrainingSection
from tests.support.weight_search import VOCABULARY, Candidate, Found, moved_by_one, search, small_t5
from tests.unit.test_training_private_trainer import SCHEDULE

pytestmark = pytest.mark.slow

CANDIDATES = int(os.environ.get("LORICA_WEIGHTS", "20"))
WHOLE = "LORICA_WEIGHTS" in os.environ
AT_MOST = 1.001
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Of which a small model needs no more, and beside which others of this machine go on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_no_weights_make_one_record_count_for_more(seed: int) -> None:
    found = search(seed, CANDIDATES)
    assert found.tried == CANDIDATES
    assert found.with_views > CANDIDATES / 4
    assert found.with_whole_chunks > CANDIDATES / 4
    assert found.gradients[0] <= AT_MOST, found.gradients
    assert found.losses[0] <= AT_MOST, found.losses


_linear = torch.nn.functional.linear


def _of_many(entered: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As by a kernel that cuts a product of more rows another way."""
    made = _linear(entered, weight, bias)
    return made * (1 + 2**-22) if entered.shape[0] > 1 else made


# --- that the search would find it


def _in_float32(uses: Sequence[Use]) -> tuple[torch.Tensor, torch.Tensor]:
    """As norms were before: products of float32, which fall below its least number."""
    single = [Use(use.module, use.entered, use.gradient.float()) for use in uses]
    with patch.object(torch.Tensor, "double", lambda tensor: tensor.float()):
        square, reach = _square_and_reach(single)
    return square.double(), torch.zeros_like(reach, dtype=torch.float64)


_square_and_reach = ghost_norms._square_and_reach


def _padded_by_others(
    chunks: Chunks, examples: EncodedExamples, indices: Sequence[int]
) -> Iterator[tuple[list[int], Batch]]:
    for some in sorted_batches(examples, chosen=indices, batch_size=max(chunks._sizes)):
        yield some, collate(examples, some, pad=0, device=CPU)


@contextmanager
def broken(how: str) -> Iterator[None]:
    with (
        patch.object(ghost_norms, "_square_and_reach", _in_float32)
        if how == "norms in float32"
        else patch.object(Chunks, "of", _padded_by_others)
    ):
        yield


@pytest.mark.skipif(not WHOLE, reason="takes minutes: `make weight-search`")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("how", ["norms in float32", "gradients of padded batches", "losses of padded batches"])
def test_what_was_broken_is_found(how: str, seed: int) -> None:
    def enough(found: Found) -> bool:
        return (found.losses if how.startswith("losses") else found.gradients)[0] > 1.05

    with broken(how):
        found = search(seed, 3 * CANDIDATES, until=enough)
    assert enough(found), (found.tried, found.gradients, found.losses)


# --- what was shown, as it was shown


def made(*, gated: bool = False, width: int = 8) -> T5ForConditionalGeneration:
    return small_t5(3, gated=gated, tied=False, width=width, d_ff=2 * width)


def rows(*lengths: tuple[int, int]) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    random = np.random.default_rng(5)
    return tuple(
        (
            random.integers(2, VOCABULARY, source).astype(np.int32),
            random.integers(2, VOCABULARY, target).astype(np.int32),
        )
        for source, target in lengths
    )


def test_attack_activations_so_large_and_gradients_so_small_that_float32_has_no_norm_of_them() -> None:
    """A word that is predicted all but surely, by activations of 1e17: gradients of 1e-23 x 1e17, where 1e-23 squared
    is 0."""
    model = made()
    with torch.no_grad():
        model.shared.weight[:, 0] = 100.0  # so that every position looks much the same
        model.decoder.final_layer_norm.weight.zero_()
        model.decoder.final_layer_norm.weight[0] = 1e17
        model.lm_head.weight.zero_()
        model.lm_head.weight[5, 0] = 5.3e-16
    words = tuple((source, np.full(len(target), 5, dtype=np.int32)) for source, target in rows(*[(5, 4)] * 5))
    candidate = Candidate(model=model, records=words, max_grad_norm=1e-8, loss_bound=10.0, batch_size=4)
    moved = moved_by_one(candidate)
    assert 0.9 < moved.gradients <= AT_MOST
    with broken("norms in float32"):
        assert moved_by_one(candidate).gradients > 10.0


def test_attack_attention_so_sharp_that_padding_is_seen() -> None:
    """Of the losses that this record has alone and beside longer ones, batches of another make would add the
    difference."""
    model = made()
    with torch.no_grad():
        for attention in (layer.layer[0].SelfAttention for layer in (model.encoder.block[0], model.decoder.block[0])):
            attention.q.weight.mul_(1e18)
            attention.k.weight.mul_(1e18)
    short, long = rows((3, 3), (30, 20))
    candidate = Candidate(model=model, records=(short,) * 5 + (long,), max_grad_norm=1e-3, loss_bound=1.0, batch_size=8)
    for batch_size in (1, 2, 8):
        moved = moved_by_one(replace(candidate, batch_size=batch_size))
        assert max(moved.gradients, moved.losses) <= AT_MOST


# --- what is computed together


def encoded(lengths: Sequence[tuple[int, int]]) -> EncodedExamples:
    records = rows(*lengths)
    return EncodedExamples(
        inputs=tuple(source for source, _ in records),
        targets=tuple(target for _, target in records),
        inputs_cut=0,
        targets_cut=0,
        targets_with_unknown=0,
    )


LENGTHS = [(source, target) for source in (1, 15, 16, 17, 33) for target in (1, 8, 9, 24)] * 3


@pytest.mark.parametrize("gated", [False, True])
def test_every_example_has_the_bits_that_it_has_alone(gated: bool) -> None:
    """Losses, norms, and what it adds to the sum, in whatever company."""
    model = made(gated=gated, width=64).train()
    parameters = list(model.parameters())
    examples = encoded(LENGTHS)
    together = list(Chunks(model, most=16).of(examples, range(len(examples))))
    assert sorted(index for indices, _ in together for index in indices) == list(range(len(examples)))
    for indices, batch in together:
        norms = clipping("ghost", model, parameters, max_grad_norm=1.0).accumulate(batch)
        losses = example_losses(model, batch)
        for row, index in enumerate(indices):
            alone = padded(examples, [index], shape_of(examples, index), pad=0, device=CPU)
            norm = clipping("ghost", model, parameters, max_grad_norm=1.0).accumulate(alone)
            assert torch.equal(losses[row], example_losses(model, alone)[0])
            assert float(norms[row]) == pytest.approx(float(norm[0]), rel=1e-12)


def test_an_example_is_padded_by_its_own_lengths() -> None:
    examples = encoded([(1, 1), (16, 8), (17, 9), (40, 30)])
    assert [shape_of(examples, index) for index in range(4)] == [
        Shape(8, 16),
        Shape(8, 16),
        Shape(16, 32),
        Shape(32, 48),
    ]


def test_rows_whose_bits_depend_on_others_are_computed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that cuts a product of more rows another way."""
    model, examples = made(), encoded([(5, 4)] * 8)
    assert all(len(indices) == 1 for indices, _ in Chunks(model, most=1).of(examples, range(8))), (
        "batch_size is the most that is in memory"
    )
    monkeypatch.setattr(chunks, "_FOUND", {})
    monkeypatch.setattr(torch.nn.functional, "linear", _of_many)
    assert all(len(indices) == 1 for indices, _ in Chunks(model, most=8).of(examples, range(8)))


# --- on a GPU, whose kernels for many rows are not those for one


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No row has in company the bits that it has alone, in which an example's company and place are of no account."""
    monkeypatch.setattr(torch.nn.functional, "linear", _of_many)
    monkeypatch.setattr(chunks, "_FOUND", {})
    monkeypatch.setattr(chunks, "launches_are_what_takes_time", lambda device: True)


def test_chunks_of_one_size_give_every_example_its_bits_whatever_was_drawn(as_on_a_gpu: None) -> None:
    """Losses, norms and addends: beside others, in another place, among few and among many."""
    model = made(width=64).train()
    parameters = list(model.parameters())
    examples = encoded(LENGTHS)
    found: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    every = list(range(len(examples)))
    for drawn in (every, every[::-1], every[::2], every[1::3], [7], [7, 7, 7, 3]):
        for indices, batch in Chunks(model, most=8).of(examples, drawn):
            assert len(batch.labels) == 8
            assert batch.empty == 8 - len(indices)
            gradients = ExampleGradients(batch.examples, CPU)
            with gradients.recording(model), batched_bias(model, len(batch.labels)):
                losses = example_losses(model, batch)
            gradients.backward(losses)
            norms, limits = gradients.norms()
            parts = [part for use in gradients.uses for part in (use.entered, use.gradient)]
            for row, index in enumerate(indices):
                found.setdefault(index, []).append(tuple(it[row].detach() for it in (losses, norms, limits, *parts)))
            assert not norms[len(indices) :].any()
            gradients.leave_out(batch.empty)
            torch.testing.assert_close(gradients.norms()[0], norms[: len(indices)], rtol=2**-40, atol=0)
            assert len(clipping("ghost", model, parameters, max_grad_norm=1.0).accumulate(batch)) == len(indices)
    assert all(len(of_one) >= 2 for of_one in found.values())
    for first, *others in found.values():
        for other in others:
            assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("backend", ["ghost", "loop"])
def test_empty_examples_add_nothing(as_on_a_gpu: None, backend: Backend) -> None:
    model, examples = made(width=64).train(), encoded(LENGTHS[:9])
    parameters = list(model.parameters())

    def added(most: int) -> torch.Tensor:
        way = clipping(backend, model, parameters, max_grad_norm=1.0)
        for _, batch in Chunks(model, most=most).of(examples, range(9)):
            way.accumulate(batch)
        return torch.cat([parameter.summed_grad.flatten() for parameter in parameters])  # type: ignore[attr-defined]

    torch.testing.assert_close(added(8), added(1), rtol=1e-5, atol=1e-7)
    whole, alone = (loss_sum(model, examples, Chunks(model, most=most), bound=8.0) for most in (8, 1))
    assert abs(whole - alone) <= 9


@pytest.mark.parametrize("place", [0, 3, 7])
def test_chunks_whose_places_differ_are_not_used(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """As by a kernel that computes one row of its tile by other instructions."""

    def by_place(entered: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = _of_many(entered, weight, bias).clone()
        if entered.shape[0] > place:
            made[place] *= 1 + 2**-22
        return made

    monkeypatch.setattr(torch.nn.functional, "linear", by_place)
    sizes = {len(batch.labels) for _, batch in Chunks(made(), most=8).of(encoded([(5, 4)] * 20), range(20))}
    assert sizes == {{0: 1, 3: 2, 7: 4}[place]}


def test_chunks_that_hear_of_their_neighbours_are_not_used(as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(entered: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        made = _of_many(entered, weight, bias)
        return made + 2**-20 * made.roll(1, 0) if entered.shape[0] > 1 else made

    monkeypatch.setattr(torch.nn.functional, "linear", beside)
    assert all(len(batch.labels) == 1 for _, batch in Chunks(made(), most=8).of(encoded([(5, 4)] * 20), range(20)))


_attention = torch.nn.functional.scaled_dot_product_attention


def test_the_way_back_through_every_block_is_tried_where_words_are_frozen(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first block's queries need no gradient where adapters are on other layers alone, and those of the rest do."""

    def by_place(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if query.requires_grad and query.shape[2] == key.shape[2] and len(query) > 1:
            factors = torch.ones(len(query), 1, 1, 1)
            factors[1] += 2**-22
            query.register_hook(lambda gradient: gradient * factors)
        return _attention(query, key, *rest, **more)

    model = small_t5(0, gated=False, tied=True, width=16)
    model.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["wo"]), model)
    examples = encoded([(5, 4)] * 4)
    assert {len(batch.labels) for _, batch in Chunks(model, most=4).of(examples, range(4))} == {4}
    monkeypatch.setattr(chunks, "_FOUND", {})
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", by_place)
    assert {len(batch.labels) for _, batch in Chunks(model, most=4).of(examples, range(4))} == {1}


@pytest.mark.parametrize("gpu", [True, False])
def test_chunks_without_any_padding_are_tried_too(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """transformers makes no mask for them, and a kernel may take another way without one."""
    if gpu:
        request.getfixturevalue("as_on_a_gpu")

    def without_mask(query: torch.Tensor, key: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        mask = more.get("attn_mask")
        made = _attention(query, key, *rest, **more)
        of_all = mask is not None and len(mask) == 1 and query.shape[2] != key.shape[2] and len(query) > 1
        return made * (1 + 2**-22) if of_all else made

    examples = encoded([(32, 16)] * 4)
    assert {len(batch.labels) for _, batch in Chunks(made(width=64), most=4).of(examples, range(4))} == {4}
    monkeypatch.setattr(chunks, "_FOUND", {})
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without_mask)
    assert {len(batch.labels) for _, batch in Chunks(made(width=64), most=4).of(examples, range(4))} == {1}


def test_processes_that_share_a_sum_fill_no_chunks_up(as_on_a_gpu: None) -> None:
    examples = encoded([(5, 4)] * 4)
    assert all(len(batch.labels) == 1 for _, batch in Chunks(made(), most=4, whole=False).of(examples, range(4)))


@pytest.mark.parametrize("lengths", [[], [(5, 4)], [(60, 30)] * 9])
def test_room_for_the_longest_texts_is_taken_first_whatever_there_is(
    as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, lengths: list[tuple[int, int]]
) -> None:
    """So that memory runs out by the plan, and not by one long record; and nothing is added."""
    seen: list[Batch] = []
    accumulate = Ghost.accumulate

    def noted(way: Ghost, batch: Batch) -> torch.Tensor:
        seen.append(batch)
        norms = accumulate(way, batch)
        assert len(seen) > 1 or not norms.any()
        assert len(seen) > 1 or not any(one.summed_grad.any() for one in parameters)  # type: ignore[attr-defined]
        return norms

    model = made()
    parameters = list(model.parameters())
    monkeypatch.setattr(Ghost, "accumulate", noted)
    examples = encoded(lengths)
    section = TrainingSection(batch_size=4, max_input_tokens=64, max_output_tokens=32)
    sum_gradients(
        model,
        parameters,
        examples,
        replace(SCHEDULE, sampling_rate=1.0),
        section,
        backend="ghost",
        words=RandomWords(bytes(32)),
        should_stop=lambda: False,
    )
    first = seen[0]
    assert first.input_ids.shape == (4, 64)
    assert first.labels.shape == (4, 32)
    assert first.empty == 0, "what is left out takes no room for its norms"
    assert max(batch.input_ids.numel() for batch in seen) == first.input_ids.numel()
