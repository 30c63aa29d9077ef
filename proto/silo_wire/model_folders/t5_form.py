"""The closed form of a config.json of T5's family: which values make a model that a machine can hold, before a library
sees any of them.

Not every key is known by name, since each release of transformers and each tool writes some of its own. Those that size
something are, under each of their names, and those that choose what computes the model are refused.
"""

from typing import Any, Final

from lorica_security.errors import MalformedMessage
from silo_wire.plans.model_files import CONFIG_FILE, parsed_file

MODEL_TYPES: Final = {
    "t5": "T5, T5 v1.1, Flan-T5, ByT5, CodeT5",
    "mt5": "mT5",
    "umt5": "umT5",
}
"""What is taken, and the models that Hugging Face has of each."""
NOT_TAKEN: Final = {
    "longt5": "its attention is in blocks, for which no test covers gradients per example: take a T5, Flan-T5 or umT5 "
    "and raise max_input_tokens, since their positions are relative",
    "switch_transformers": "it routes each token to one of many experts, and how many fit depends on what else is in "
    "the batch, so that no example's gradient is its own: take a T5 or Flan-T5",
}
"""Others of the family, and why they are not."""
_SIZE: Final = (1, 1 << 20)
_LAYERS: Final = (1, 1000)
_RANGES: Final = {
    "vocab_size": (1, 1 << 22),
    **dict.fromkeys(("d_model", "hidden_size", "d_ff", "d_kv", "head_dim"), _SIZE),
    **dict.fromkeys(("num_heads", "num_attention_heads"), (1, 1 << 12)),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "num_decoder_layers"), _LAYERS),
    "relative_attention_num_buckets": (4, 1 << 12),
    "relative_attention_max_distance": (1, 1 << 20),
    "num_labels": (0, 1000),
}
"""T5-11B has 24 layers of 128 heads and a d_ff of 65,536; mT5 has 250,112 rows. `num_labels` makes so many names."""
_MAY_BE_NULL: Final = frozenset({"num_decoder_layers", "num_labels"})
_BUCKETS, _FURTHEST = 32, 128
"""Where a file does not say how many buckets, and how far they go."""
_MOST_KEYS: Final = 1000
_LONGEST_TEXT: Final = 100
_TEXTS: Final = ("feed_forward_proj", "dense_act_fn", "tokenizer_class")


def t5_values(raw: bytes) -> dict[str, Any]:
    """What a config.json says; raises MalformedMessage, naming the key and the value, where it is not in the form."""
    values = parsed_file(CONFIG_FILE, raw)
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        reason = NOT_TAKEN.get(kind, "") if isinstance(kind, str) else ""
        taken = ", ".join(f"{name} ({what})" for name, what in MODEL_TYPES.items())
        raise MalformedMessage(
            f"{CONFIG_FILE} has model_type {_line(kind)}: {reason or f'only those of T5 are taken: {taken}'}"
        )
    if len(values) > _MOST_KEYS:
        raise MalformedMessage(f"{CONFIG_FILE} has {len(values):,} keys: more than {_MOST_KEYS:,}")
    if chosen := [key for key in values if "implementation" in key or "kernel" in key]:
        raise MalformedMessage(
            f"{CONFIG_FILE} has {chosen[0][:_LONGEST_TEXT]}: what computes a model is chosen here, and no code "
            "comes from a peer; leave it out"
        )
    if "quantization_config" in values:
        raise MalformedMessage(f"{CONFIG_FILE} asks for quantisation: only float32 models are taken")
    for key, (least, most) in _RANGES.items():
        value = values.get(key, least)
        if value is None and key in _MAY_BE_NULL:
            continue
        if type(value) is not int or not least <= value <= most:
            raise MalformedMessage(
                f"{CONFIG_FILE} has {key} {_line(value)}: it must be a whole number of {least} to {most:,}"
            )
    _require_buckets(values)
    for key in _TEXTS:
        text = values.get(key)
        if text is not None and (not isinstance(text, str) or len(text) > _LONGEST_TEXT):
            raise MalformedMessage(
                f"{CONFIG_FILE} has {key} {_line(text)}: it must be a text of at most {_LONGEST_TEXT} characters"
            )
    return values


def _require_buckets(values: dict[str, Any]) -> None:
    """Distances above half of the buckets go by the logarithm of how much further they are: of no further it is 0, by
    which the library divides."""
    buckets = values.get("relative_attention_num_buckets", _BUCKETS)
    furthest = values.get("relative_attention_max_distance", _FURTHEST)
    if furthest <= buckets // 2:
        raise MalformedMessage(
            f"{CONFIG_FILE} has relative_attention_max_distance {furthest}: it must be more than {buckets // 2}, half "
            "of relative_attention_num_buckets"
        )


def _line(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
