"""The loss of each example: the mean cross entropy of its own target tokens, so that no example changes that of another."""

import torch
from torch.nn import functional

from silo_agent.training.batches import IGNORED, Batch
from silo_agent.training.model import T5
from silo_agent.training.task_loss import encoded_inputs, previous_tokens


def example_losses(model: T5, batch: Batch) -> torch.Tensor:
    """Shape (B,), float32. The output layer sees padding, too: its rows belong to examples."""
    logits = model.lm_head(_decoded(model, batch)).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none", ignore_index=IGNORED)
    return losses.sum(dim=1) / _tokens(batch)


def losses_of_kept(model: T5, batch: Batch) -> torch.Tensor:
    """The same, but the output layer, half of a small model's work, sees no padding: its input is of shape (kept tokens, d_model)."""
    kept = batch.labels != IGNORED
    logits = model.lm_head(_decoded(model, batch)[kept]).float()
    losses = functional.cross_entropy(logits, batch.labels[kept], reduction="none")
    examples = kept.nonzero()[:, 0]
    return losses.new_zeros(len(batch.labels)).index_add(0, examples, losses) / _tokens(batch)


def _decoded(model: T5, batch: Batch) -> torch.Tensor:
    config = model.config
    hidden: torch.Tensor = model.get_decoder()(
        input_ids=previous_tokens(model, batch.labels),
        encoder_hidden_states=encoded_inputs(model, batch),
        encoder_attention_mask=batch.attention_mask,
        use_cache=False,
    )[0]
    return hidden * config.d_model**-0.5 if config.scale_decoder_outputs else hidden


def _tokens(batch: Batch) -> torch.Tensor:
    return (batch.labels != IGNORED).sum(dim=1).clamp(min=1)
