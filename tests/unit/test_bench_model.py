"""The benchmark's T5: as many parameters as were asked for, in the published proportions."""

import pytest
import torch
from transformers import T5ForConditionalGeneration

from lorica.bench.model import T5_3B_PARAMETERS, T5_BASE_PARAMETERS, shape
from lorica_security.errors import ConfigurationError


def parameters(asked: int) -> int:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(shape(asked))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("asked", [400_000, 1_000_000, 2_000_000, 25_000_000, 50_000_000, 1_500_000_000, 3_000_000_000])
def test_the_count_is_within_a_row_of_the_embedding(asked: int) -> None:
    assert 0 <= asked - parameters(asked) < shape(asked).d_model


def test_t5_base_is_t5_base() -> None:
    config = shape(T5_BASE_PARAMETERS)
    assert (config.d_model, config.d_ff, config.num_heads, config.d_kv) == (768, 3072, 12, 64)
    assert (config.num_layers, config.vocab_size) == (12, 32128)
    assert parameters(T5_BASE_PARAMETERS) == T5_BASE_PARAMETERS


def test_t5_3b_is_t5_3b() -> None:
    config = shape(T5_3B_PARAMETERS)
    assert (config.d_model, config.d_ff, config.num_heads, config.d_kv) == (1024, 16384, 32, 128)
    assert (config.num_layers, config.vocab_size) == (24, 32128)
    assert parameters(T5_3B_PARAMETERS) == T5_3B_PARAMETERS


def test_too_few_parameters_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="PARAMETERS=300000"):
        shape(300_000)
