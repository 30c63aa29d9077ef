"""A model of a size, and parameters that a plan's seed makes: the coordinator makes them for a new plan, a silo makes
them again to compare.

The same bits come out on processors whose vector instructions torch uses alike, with the same release of torch: a
machine without AVX2 draws other normal numbers. A difference is thus no proof that anybody cheated.
"""

import math
from collections.abc import Iterator
from typing import Any

from silo_wire.manifest import Layout
from silo_wire.plans.sizes import Size


def sized_config(size: Size, tokenizer: Any) -> Any:
    """The T5Config of a model of `size` with the vocabulary of `tokenizer`, a T5Tokenizer."""
    # Here, not above: transformers takes seconds to import, and most of what reads plans does not need it.
    from transformers import T5Config

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=size.d_model,
        d_kv=size.d_kv,
        d_ff=size.d_ff,
        num_layers=size.layers,
        num_heads=size.heads,
        feed_forward_proj="gated-gelu" if size.gated else "relu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config.decoder_start_token_id = tokenizer.pad_token_id
    return config


def seeded_t5(config: Any, seed: int) -> Any:
    """A model of this configuration with random float32 parameters; torch's own generator stays as it is."""
    import torch

    from silo_wire.model_folders.t5_config import model_class

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config)(config)


def seeded_adapters(layout: Layout, seed: int) -> Iterator[memoryview]:
    """The flat float32 vector of new adapters, tensor by tensor: A is random, as PEFT begins it, and B zero."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for tensor in layout.tensors:
        values = torch.zeros(tensor.shape)
        if ".lora_A." in tensor.name:
            torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        yield values.reshape(-1).numpy().data.cast("B")
