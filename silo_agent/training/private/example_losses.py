"""The loss of each example: the mean cross entropy of its own target tokens, so that no example changes that of another."""

import torch
from torch.nn import functional

from silo_agent.training.batches import IGNORED, Batch
from silo_agent.training.model import T5
from silo_agent.training.task_loss import encoded_inputs, previous_tokens


def example_losses(model: T5, batch: Batch) -> torch.Tensor:
    """Shape (B,), float32. The output layer sees padding, too: its rows belong to examples."""
    config = model.config
    hidden = model.get_decoder()(
        input_ids=previous_tokens(model, batch.labels),
        encoder_hidden_states=encoded_inputs(model, batch),
        encoder_attention_mask=batch.attention_mask,
        use_cache=False,
    )[0]
    if config.scale_decoder_outputs:
        hidden = hidden * config.d_model**-0.5
    logits = model.lm_head(hidden).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none", ignore_index=IGNORED)
    tokens = (batch.labels != IGNORED).sum(dim=1).clamp(min=1)
    means: torch.Tensor = losses.sum(dim=1) / tokens
    return means
