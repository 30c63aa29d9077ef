"""The tensors that a peer carries: T5-base's, or as many that are thinner, so that a count comes out exactly."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

from lorica_security.errors import ConfigurationError

Tensor = tuple[str, tuple[int, ...]]

T5_BASE_PARAMETERS = 222_903_552
_WIDTH, _FEED_FORWARD, _PIECES, _BUCKETS, _HEADS, _LAYERS = 768, 3072, 32128, 32, 12, 12


def t5_base() -> list[Tensor]:
    """Names and shapes of T5-base (Raffel et al. 2020) in its own order, the tied embedding once."""
    tensors: list[Tensor] = [("shared", (_PIECES, _WIDTH))]
    for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        for block in range(_LAYERS):
            at = f"{stack}.{block}"
            for attention in attentions:
                tensors += [(f"{at}.{attention}.{matrix}", (_WIDTH, _WIDTH)) for matrix in "qkvo"]
                if attention == "self" and block == 0:
                    tensors.append((f"{at}.{attention}.relative_attention_bias", (_BUCKETS, _HEADS)))
                tensors.append((f"{at}.{attention}.layer_norm", (_WIDTH,)))
            tensors.append((f"{at}.wi", (_FEED_FORWARD, _WIDTH)))
            tensors.append((f"{at}.wo", (_WIDTH, _FEED_FORWARD)))
            tensors.append((f"{at}.layer_norm", (_WIDTH,)))
        tensors.append((f"{stack}.final_layer_norm", (_WIDTH,)))
    return tensors


def layout(parameters: int) -> list[Tensor]:
    """T5-base's tensors with fewer (or more) rows each, `parameters` values in all.

    The embedding takes up what the rounding of rows leaves over, and one tensor what does not fill a row of it.
    Raises ConfigurationError for a count that would leave the embedding without rows.
    """
    (embedding, _), *others = t5_base()
    scaled = [(name, (max(1, round(shape[0] * parameters / T5_BASE_PARAMETERS)), *shape[1:])) for name, shape in others]
    rows, left = divmod(parameters - sum(prod(shape) for _, shape in scaled), _WIDTH)
    if rows < 1:
        raise ConfigurationError(f"PARAMETERS={parameters} is too few for T5-base's tensors: use 1,000,000 or more")
    return [(embedding, (rows, _WIDTH)), *scaled, *([("remainder", (left,))] if left else [])]


def write_layout(file: Path, tensors: Sequence[Tensor]) -> None:
    file.write_text(json.dumps(tensors), encoding="utf-8")
