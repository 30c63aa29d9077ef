"""The closed form of a T5's config.json: which values make a model that a machine can hold, before a library sees any
of them.

Not every key is known by name, since each release of transformers and each tool writes some of its own. Those that size
something are, under each of their names, and those that choose what computes the model are refused.
"""

from typing import Any, Final

from lorica_security.errors import MalformedMessage
from silo_wire.plans.model_files import CONFIG_FILE, parsed_file

_SIZE: Final = (1, 1 << 20)
_LAYERS: Final = (1, 1000)
_RANGES: Final = {
    "vocab_size": (1, 1 << 22),
    **dict.fromkeys(("d_model", "hidden_size", "d_ff", "d_kv", "head_dim"), _SIZE),
    **dict.fromkeys(("num_heads", "num_attention_heads"), (1, 1 << 12)),
    **dict.fromkeys(("num_layers", "num_hidden_layers", "num_decoder_layers"), _LAYERS),
    "relative_attention_num_buckets": (1, 1 << 12),
    "relative_attention_max_distance": (1, 1 << 20),
    "num_labels": (0, 1000),
}
"""T5-11B has 24 layers of 128 heads and a d_ff of 65,536; mT5 has 250,112 rows. `num_labels` makes so many names."""
_MAY_BE_NULL: Final = frozenset({"num_decoder_layers", "num_labels"})
_MOST_KEYS: Final = 1000
_LONGEST_TEXT: Final = 100
_TEXTS: Final = ("feed_forward_proj", "dense_act_fn", "tokenizer_class")


def t5_values(raw: bytes) -> dict[str, Any]:
    """What a config.json says; raises MalformedMessage, naming the key and the value, where it is not in the form."""
    values = parsed_file(CONFIG_FILE, raw)
    if values.get("model_type") != "t5":
        raise MalformedMessage(
            f"{CONFIG_FILE} has model_type {_line(values.get('model_type'))}: only t5 is taken (T5, T5 v1.1, Flan-T5)"
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
    for key in _TEXTS:
        text = values.get(key)
        if text is not None and (not isinstance(text, str) or len(text) > _LONGEST_TEXT):
            raise MalformedMessage(
                f"{CONFIG_FILE} has {key} {_line(text)}: it must be a text of at most {_LONGEST_TEXT} characters"
            )
    return values


def _line(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 3]}..."
