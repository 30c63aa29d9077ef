"""The loss of each example: the mean cross entropy of its own target tokens that count, so that no example changes that
of another; 0, and without a gradient, where none does."""

import torch
from torch.nn import functional

from silo_agent.training.data.batches import IGNORED, Batch
from silo_agent.training.model.model import T5
from silo_agent.training.private.per_example.own_activations import own_activations
from silo_agent.training.task_loss import encoded_inputs, previous_tokens
from silo_wire.model_folders.t5_config import scales_output


def example_losses(model: T5, batch: Batch) -> torch.Tensor:
    """Shape (B,), float32. Every layer sees padding, too: its rows belong to examples, and their number to the
    shape."""
    config = model.config
    with own_activations(model):
        hidden: torch.Tensor = model.get_decoder()(
            input_ids=previous_tokens(model, batch.labels),
            encoder_hidden_states=encoded_inputs(model, batch),
            encoder_attention_mask=batch.attention_mask,
            use_cache=False,
        )[0]
    logits = model.lm_head(hidden * config.d_model**-0.5 if scales_output(config) else hidden).float()
    labels = batch.labels.clamp(min=IGNORED)
    # Row by row, not with the vocabulary in the middle, which takes half as much time again.
    losses = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED
    ).view(labels.shape)
    return losses.sum(dim=1) / (labels != IGNORED).sum(dim=1).clamp(min=1)
