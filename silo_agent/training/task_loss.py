"""The task loss: cross entropy of the gold query's tokens, teacher forced, summed so that callers choose the mean.

Where a task says which tokens count, the decoder is told the others and the loss does not have them.
"""

import torch
from torch.nn import functional

from silo_agent.training.data.batches import IGNORED, UNCOUNTED, Batch
from silo_agent.training.model.model import T5
from silo_wire.model_folders.t5_config import scales_output


def encoded_inputs(model: T5, batch: Batch) -> torch.Tensor:
    """The encoder's output, shape (B, S, d_model)."""
    hidden: torch.Tensor = model.get_encoder()(input_ids=batch.input_ids, attention_mask=batch.attention_mask)[0]
    return hidden


def previous_tokens(model: T5, labels: torch.Tensor) -> torch.Tensor:
    """What the decoder is fed, shape (B, T): at each place the target's token before it."""
    previous = labels.new_full(labels.shape, model.config.decoder_start_token_id)
    told = torch.where(labels <= UNCOUNTED, UNCOUNTED - labels, labels)
    previous[:, 1:] = told[:, :-1].masked_fill(told[:, :-1] == IGNORED, model.config.pad_token_id)
    return previous


def summed_loss(model: T5, batch: Batch, encoded: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over all target tokens of the batch that count, a scalar in float32, 0 of none; others cost no work in the
    output layer."""
    logits, targets = target_logits(model, batch, encoded)
    return functional.cross_entropy(logits, targets, reduction="sum")


def example_means(model: T5, batch: Batch) -> torch.Tensor:
    """The mean over each example's own target tokens that count, shape (B,), float32; 0 of none."""
    logits, targets = target_logits(model, batch, None)
    losses = functional.cross_entropy(logits, targets, reduction="none")
    tokens = (batch.labels >= 0).sum(dim=1)
    return torch.stack([own.sum() / max(1, len(own)) for own in torch.split(losses, tokens.tolist())])


def target_logits(model: T5, batch: Batch, encoded: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits in float32 and labels of all target tokens that count, row by row."""
    if encoded is None:
        encoded = encoded_inputs(model, batch)
    config = model.config
    hidden = model.get_decoder()(
        input_ids=previous_tokens(model, batch.labels),
        encoder_hidden_states=encoded,
        encoder_attention_mask=batch.attention_mask,
        use_cache=False,
    )[0]
    kept = batch.labels >= 0
    hidden = hidden[kept]
    if scales_output(config):
        hidden = hidden * config.d_model**-0.5
    return model.lm_head(hidden).float(), batch.labels[kept]
