"""The configuration that a config.json makes, and the class of its model, on both sides: what a silo would refuse is
refused where its plan is made.

The form of the file is t5_form.py's, which needs no transformers.
"""

from collections.abc import Mapping
from typing import Any, Final

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from lorica_security.errors import MalformedMessage
from silo_wire.model_folders.t5_form import t5_values
from silo_wire.plans.model_files import CONFIG_FILE
from silo_wire.plans.sections.training import MOST_DROPOUT

FAMILY: Final[Mapping[str, tuple[type[Any], type[Any]]]] = {
    "t5": (T5Config, T5ForConditionalGeneration),
    "mt5": (MT5Config, MT5ForConditionalGeneration),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration),
}
"""The configuration and the model of each type that t5_form.py takes."""
LEAST_EPSILON, MOST_EPSILON = 1e-12, 1e-2
"""Of layer norms; T5's own is 1e-6."""
NO_CONFIGURATION = (
    StrictDataclassError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
"""What transformers and torch raise for sizes and names that no model can have."""


def model_class(config: Any) -> type[Any]:
    """Of transformers' own, for a configuration that `t5_config` gives."""
    return FAMILY[config.model_type][1]


def scales_output(config: Any) -> bool:
    """Whether what leaves the decoder is scaled by d_model to the power of -1/2 before the output layer: T5's and
    umT5's is, that of v1.1 and mT5 is not. A test holds it equal to what the classes do."""
    if config.model_type == "t5":
        return bool(config.scale_decoder_outputs)
    return bool(config.model_type == "umt5" and config.tie_word_embeddings)


def t5_config(raw: bytes, dropout: float | None = None) -> Any:
    """Of a config.json, of the class in FAMILY; raises MalformedMessage where it makes no plain T5."""
    value = t5_values(raw)
    kind = FAMILY[value["model_type"]][0]
    if taken := [key for key in value if callable(getattr(kind, key, None))]:
        raise MalformedMessage(f"{CONFIG_FILE} has {taken[0]}, which is no value of a T5: leave it out")
    try:
        config = kind.from_dict({**value, "use_cache": True, "dtype": "float32"})
    except NO_CONFIGURATION as error:
        raise MalformedMessage(f"{CONFIG_FILE} makes no T5: {' '.join(str(error).split())}") from error
    for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id"):
        number = getattr(config, name, None)
        if type(number) is not int or not 0 <= number < config.vocab_size:
            raise MalformedMessage(f"{CONFIG_FILE} has {name} {number!r}: it must be a token below {config.vocab_size}")
    epsilon = config.layer_norm_epsilon
    if type(epsilon) not in (int, float) or not LEAST_EPSILON <= epsilon <= MOST_EPSILON:
        raise MalformedMessage(
            f"{CONFIG_FILE} has layer_norm_epsilon {epsilon!r}: it must be {LEAST_EPSILON:g} to {MOST_EPSILON:g}, "
            "since without it the norm of zeros is none, and beside much of it nothing else is left"
        )
    if dropout is not None:
        config.dropout_rate = dropout
    if not 0 <= config.dropout_rate <= MOST_DROPOUT:
        raise MalformedMessage(
            f"{CONFIG_FILE} has dropout_rate {config.dropout_rate!r}: it must be 0 to {MOST_DROPOUT:g}"
        )
    return config
