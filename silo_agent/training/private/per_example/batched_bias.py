"""T5's relative position bias, computed once per example instead of once per batch.

transformers looks it up without a batch dimension, and every example of a batch uses the same lookup. Gradients per
example cannot be had of that: hooks fail on it, or, where batch, input and target happen to have one size, give wrong
numbers and say nothing. With a lookup for each example the values are the very same.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from silo_agent.training.model.model import T5

ATTENTIONS = (T5Attention, MT5Attention, UMT5Attention)


@contextmanager
def batched_bias(model: T5, batch: int) -> Iterator[None]:
    """While this is open, forward passes of `model` are of `batch` examples."""
    attentions: list[Any] = [module for module in model.modules() if isinstance(module, ATTENTIONS)]
    changed = [module for module in attentions if module.has_relative_attention_bias]
    for module in changed:
        module.compute_bias = partial(_compute_bias, module, batch)
    try:
        yield
    finally:
        for module in changed:
            del module.compute_bias


def _compute_bias(
    attention: Any,
    batch: int,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: int = 0,
) -> torch.Tensor:
    """As the attention's own compute_bias, of shape (batch, heads, query_length, key_length) instead of (1, ...)."""
    positions = torch.arange(key_length, dtype=torch.long, device=device)[None, :]
    queries = torch.arange(query_length, dtype=torch.long, device=device)[:, None] + past_seen_tokens
    options = (
        {}  # which umT5's attention knows itself
        if isinstance(attention, UMT5Attention)
        else {
            "bidirectional": not attention.is_decoder,
            "num_buckets": attention.relative_attention_num_buckets,
            "max_distance": attention.relative_attention_max_distance,
        }
    )
    buckets = attention._relative_position_bucket(positions - queries, **options)
    bias: torch.Tensor = attention.relative_attention_bias(buckets.expand(batch, -1, -1))
    return bias.permute(0, 3, 1, 2)
