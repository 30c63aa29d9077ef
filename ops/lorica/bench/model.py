"""A T5 of a wanted number of parameters in T5-base's proportions, as a Hugging Face folder.

T5-base (Raffel et al. 2020): d_model 768, feed-forward 4 d_model, heads of 64, 12 layers on each side, 32128 pieces;
222,903,552 parameters with the embedding counted once. Other counts keep the 12 layers and the proportions of a layer;
the vocabulary takes up the rest, so that the count comes out to within one row of the embedding. From a billion on the
proportions are those of T5-3B: d_model 1024, feed-forward 16384, 32 heads of 128, 24 layers; 2,851,598,336 parameters.
Below 2 million there are two layers on each side, as in the demo's model.
"""

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForSeq2SeqLM, T5Config, T5ForConditionalGeneration

from lorica_security.errors import ConfigurationError
from silo_wire.model_folders.seeded_tokenizer import train_tokenizer
from silo_wire.public_text import public_text

T5_BASE_PARAMETERS = 222_903_552
T5_3B_PARAMETERS = 2_851_598_336
LARGE = 1_000_000_000
SMALL = 2_000_000
LEAST_PARAMETERS = 400_000
LAYERS = 12
LAYERS_OF_SMALL = 2
HEAD = 64
PIECES = 2000
"""The tokenizer's own; the embedding has as many rows as the count asks for."""


def shape(parameters: int) -> T5Config:
    """Raises ConfigurationError for a count so small that the embedding would not hold the tokenizer's pieces."""
    if parameters >= LARGE:
        large = _large(layers=max(1, 24 * parameters // T5_3B_PARAMETERS), rows=PIECES)
        rows = PIECES + (parameters - _count(large)) // large.d_model
        return _large(layers=large.num_layers, rows=rows)
    layers = LAYERS if parameters >= SMALL else LAYERS_OF_SMALL
    for width in range(1024, 0, -HEAD):
        rows = (parameters - _without_embedding(width, layers)) // width
        if rows >= max(PIECES, parameters // (10 * width)):  # the embedding is about a tenth of T5-base
            return _config(width, rows, layers)
    raise ConfigurationError(f"PARAMETERS={parameters} is too few: use {LEAST_PARAMETERS:,} or more")


def write_model(folder: Path, parameters: int, seed: int, dtype: torch.dtype = torch.float32) -> int:
    """Write config.json, model.safetensors and a tokenizer; the number of parameters that came out."""
    config = shape(parameters)
    folder.mkdir(parents=True)
    tokenizer = train_tokenizer(public_text(), PIECES)
    tokenizer.save_pretrained(folder)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.decoder_start_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    try:
        model.save_pretrained(folder, max_shard_size="1TB")
    except OSError:
        shutil.rmtree(folder)
        raise
    return sum(parameter.numel() for parameter in model.parameters())


def _config(width: int, rows: int, layers: int) -> T5Config:
    return T5Config(
        vocab_size=rows,
        d_model=width,
        d_kv=HEAD,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=width // HEAD,
        feed_forward_proj="relu",
    )


def _large(*, layers: int, rows: int) -> T5Config:
    return T5Config(
        vocab_size=rows,
        d_model=1024,
        d_kv=128,
        d_ff=16384,
        num_layers=layers,
        num_heads=32,
        feed_forward_proj="relu",
    )


def _without_embedding(width: int, layers: int) -> int:
    return _count(_config(width, PIECES, layers)) - PIECES * width


def _count(config: T5Config) -> int:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(config)
    return sum(parameter.numel() for parameter in model.parameters())
