"""Clipped gradients in all three ways, beside a plain loop over single examples on a T5 that nothing was done to."""

import gc
from collections.abc import Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Attention

from lorica_security.errors import StateError
from silo_agent.training.data.batches import IGNORED, Batch
from silo_agent.training.private.clipping import MARGIN, Backend, clip_factors, clipping
from silo_agent.training.private.per_example.batched_bias import batched_bias
from silo_agent.training.private.per_example.example_losses import example_losses
from silo_agent.training.private.per_example.ghost_norms import check_covered

VOCABULARY = 97
EXACT = 1e-5
BOUND = 0.4
BACKENDS: Sequence[Backend] = ("ghost", "loop")


def t5(*, gated: bool = False, tied: bool = True, dropout: float = 0.0) -> T5ForConditionalGeneration:
    torch.manual_seed(1)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu" if gated else "relu",
        dropout_rate=dropout,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    if not tied:
        model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.1)
    return model.train()


def batch_of(examples: int, source: int, target: int, *, ragged: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(examples * 10_000 + source * 100 + target)

    def drawn(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    ids, labels = drawn(2, VOCABULARY, (examples, source)), drawn(2, VOCABULARY, (examples, target))
    ids[:, -1] = ids[:, 0]  # tokens that come twice, and on both sides
    labels[:, -1] = ids[:, 0]
    mask = torch.ones(examples, source, dtype=torch.bool)
    for row in range(1, examples) if ragged else ():
        ids[row, (length := int(drawn(1, source + 1, (1,)))) :] = 0
        mask[row, length:] = False
        labels[row, int(drawn(1, target + 1, (1,))) :] = IGNORED
    return Batch(ids, mask, labels, int((labels != IGNORED).sum()))


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients_one_by_one(model: nn.Module, batch: Batch) -> list[torch.Tensor]:
    """Of each example, flat: transformers' own forward pass, loss and masks, and no padding."""
    found = []
    for row in range(len(batch.labels)):
        labels = batch.labels[row][batch.labels[row] != IGNORED][None]
        logits = model(
            input_ids=batch.input_ids[row][batch.attention_mask[row]][None],
            attention_mask=torch.ones(1, int(batch.attention_mask[row].sum())),
            labels=labels,
        ).logits
        loss = functional.cross_entropy(logits[0], labels[0], reduction="mean")
        gradients = torch.autograd.grad(loss, parameters_of(model))
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))
    return found


def clipped_sum(
    model: nn.Module, batch: Batch, backend: Backend, *, chunks: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms and the flat sum."""
    parameters = parameters_of(model)
    way = clipping(backend, model, parameters, max_grad_norm=BOUND)
    norms = []
    for rows in torch.arange(len(batch.labels)).chunk(chunks):
        part = Batch(batch.input_ids[rows], batch.attention_mask[rows], batch.labels[rows], 0)
        norms.append(way.accumulate(part))
    return torch.cat(norms), torch.cat([parameter.summed_grad.flatten() for parameter in parameters])  # type: ignore[attr-defined]


def check_beside_the_loop(model: nn.Module, batch: Batch, backend: Backend) -> None:
    model.eval()
    single = gradients_one_by_one(model, batch)
    model.train()
    norms, total = clipped_sum(model, batch, backend)
    expected_norms = torch.stack([gradient.double().norm() for gradient in single])
    factors = clip_factors(expected_norms, BOUND * (1 - MARGIN))
    expected = sum((gradient * factor for gradient, factor in zip(single, factors, strict=True)), torch.tensor(0.0))
    assert torch.allclose(norms, expected_norms, rtol=EXACT, atol=0)
    assert float((total - expected).norm() / expected.norm()) < EXACT


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gated", [False, True], ids=["v1.0", "v1.1-gated"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("sizes", [(5, 9, 7), (3, 40, 2), (1, 4, 4), (4, 1, 1)], ids=str)
def test_ragged_batches(backend: Backend, gated: bool, tied: bool, sizes: tuple[int, int, int]) -> None:
    check_beside_the_loop(t5(gated=gated, tied=tied), batch_of(*sizes), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_batch_source_and_target_of_one_size(backend: Backend, tied: bool) -> None:
    """The relative position bias has no batch dimension: of (6, 6) positions and 6 examples hooks make nonsense,
    silently."""
    check_beside_the_loop(t5(tied=tied), batch_of(6, 6, 6, ragged=False), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_alone(backend: Backend) -> None:
    model = get_peft_model(t5(), LoraConfig(r=4, target_modules=["q", "v", "wi", "wo"], lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    inner = model.base_model.model
    check_covered(inner)
    check_beside_the_loop(inner, batch_of(5, 9, 7), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_frozen_bias(backend: Backend) -> None:
    model = t5()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("relative_attention_bias" not in name)
    check_beside_the_loop(model, batch_of(6, 6, 6, ragged=False), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_physical_batches_add_up(backend: Backend) -> None:
    model, batch = t5(), batch_of(7, 9, 7)
    norms, whole = clipped_sum(model, batch, backend)
    for chunks in (2, 7):
        again, parts = clipped_sum(model, batch, backend, chunks=chunks)
        assert torch.allclose(norms, again, rtol=EXACT)
        assert float((whole - parts).norm() / whole.norm()) < EXACT


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_example_adds_more_than_the_bound(backend: Backend) -> None:
    """Neighbouring batches: what one example more changes in the sum."""
    model, batch = t5(), batch_of(5, 9, 7)
    _, with_all = clipped_sum(model, batch, backend)
    for row in range(5):
        others = [index for index in range(5) if index != row]
        fewer = Batch(batch.input_ids[others], batch.attention_mask[others], batch.labels[others], 0)
        _, without = clipped_sum(model, fewer, backend)
        assert float((with_all - without).norm()) <= BOUND


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_example_whose_gradient_is_not_finite_counts_as_zero(backend: Backend) -> None:
    model, batch = t5(), batch_of(4, 9, 7)
    with torch.no_grad():
        model.shared.weight[50] = float("inf")
    clean = (batch.input_ids != 50).all(dim=1) & (batch.labels != 50).all(dim=1)
    batch.input_ids[2, 0] = 50
    clean[2] = False
    # An infinite row of the output layer reaches every example of a tied model.
    model.lm_head.weight = nn.Parameter(torch.randn(VOCABULARY, 32) * 0.1)
    rows = clean.nonzero().flatten()
    others = Batch(batch.input_ids[rows], batch.attention_mask[rows], batch.labels[rows], 0)
    norms, total = clipped_sum(model, batch, backend)
    assert norms.isfinite().tolist() == clean.tolist()
    _, expected = clipped_sum(model, others, backend)
    assert float((total - expected).norm() / expected.norm()) < EXACT


def test_an_example_without_target_tokens_has_no_loss() -> None:
    batch = batch_of(2, 4, 3)
    batch.labels[1] = IGNORED
    assert example_losses(t5(), batch)[1] == 0.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("empty", [[1], [0, 2], [0, 1, 2]], ids=str)
def test_examples_without_target_tokens_among_others(backend: Backend, empty: list[int]) -> None:
    model, batch = t5(), batch_of(3, 4, 3)
    batch.labels[empty] = IGNORED
    norms, total = clipped_sum(model, batch, backend)
    assert (norms[empty] == 0.0).all()
    others = [row for row in range(3) if row not in empty]
    if others:
        alone = Batch(batch.input_ids[others], batch.attention_mask[others], batch.labels[others], 0)
        expected_norms, expected = clipped_sum(model, alone, backend)
        assert torch.allclose(norms[others], expected_norms, rtol=EXACT)
        assert float((total - expected).norm() / expected.norm()) < EXACT
    else:
        assert (total == 0.0).all()


def test_one_example_changes_no_other_ones_loss() -> None:
    model, batch = t5().eval(), batch_of(5, 9, 7)
    alone = Batch(batch.input_ids[:1], batch.attention_mask[:1], batch.labels[:1], 0)
    assert torch.allclose(example_losses(model, batch)[:1], example_losses(model, alone), rtol=1e-6)


def test_the_bias_of_each_example_is_the_bias_of_the_batch() -> None:
    model = t5()
    for attention in (module for module in model.modules() if isinstance(module, T5Attention)):
        if attention.has_relative_attention_bias:
            once = attention.compute_bias(5, 7)
            with batched_bias(model, 3):
                each = attention.compute_bias(5, 7)
            assert each.shape == (3, *once.shape[1:])
            assert torch.equal(each, once.expand_as(each))
            assert attention.compute_bias(5, 7).shape == once.shape


# --- what is refused


def test_every_module_of_a_t5_is_covered() -> None:
    for gated in (False, True):
        check_covered(t5(gated=gated))


def test_a_trained_module_that_no_test_covers_is_refused() -> None:
    model = t5()
    model.encoder.extra = nn.LayerNorm(32)
    with pytest.raises(StateError, match=r"module encoder\.extra has type LayerNorm"):
        check_covered(model)
    for parameter in model.encoder.extra.parameters():
        parameter.requires_grad_(False)
    check_covered(model)


def test_a_subclass_that_computes_something_else_is_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    model = t5()
    model.encoder.block[0].layer[0].SelfAttention.q = Doubled(32, 32, bias=False)
    with pytest.raises(StateError, match="Doubled"):
        check_covered(model)


def test_linear_layers_that_share_a_weight_are_refused() -> None:
    model = t5()
    attention = model.encoder.block[0].layer[0].SelfAttention
    attention.q.weight = attention.k.weight
    with pytest.raises(StateError, match="share a weight"):
        check_covered(model)


def test_a_linear_layer_with_a_bias_is_refused() -> None:
    model = t5()
    model.encoder.block[0].layer[0].SelfAttention.q = nn.Linear(32, 32)
    with pytest.raises(StateError, match="has a bias"):
        check_covered(model)


def test_an_embedding_with_options_is_refused() -> None:
    model = t5()
    model.shared = nn.Embedding(VOCABULARY, 32, padding_idx=0)
    with pytest.raises(StateError, match="shared has options"):
        check_covered(model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_graph_of_a_batch_goes_with_the_batch(backend: Backend) -> None:
    """Held in a circle of references it would stay until Python looks for circles: batches upon batches in memory."""
    model = t5()
    way = clipping(backend, model, parameters_of(model), max_grad_norm=BOUND)

    def tensors() -> int:
        return sum(isinstance(held, torch.Tensor) for held in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        way.accumulate(batch_of(3, 5, 7))
        after_one = tensors()
        way.accumulate(batch_of(3, 6, 4))
        assert tensors() == after_one
    finally:
        gc.enable()
