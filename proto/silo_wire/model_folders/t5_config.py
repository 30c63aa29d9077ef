"""The configuration that a config.json makes, on both sides: what a silo would refuse is refused where its plan is
made.

The form of the file is t5_form.py's, which needs no transformers.
"""

from huggingface_hub.errors import StrictDataclassError
from transformers import T5Config

from lorica_security.errors import MalformedMessage
from silo_wire.model_folders.t5_form import t5_values
from silo_wire.plans.model_files import CONFIG_FILE
from silo_wire.plans.sections.training import MOST_DROPOUT

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


def t5_config(raw: bytes, dropout: float | None = None) -> T5Config:
    """Of a config.json; raises MalformedMessage where it makes no plain T5."""
    value = t5_values(raw)
    if taken := [key for key in value if callable(getattr(T5Config, key, None))]:
        raise MalformedMessage(f"{CONFIG_FILE} has {taken[0]}, which is no value of a T5: leave it out")
    try:
        config = T5Config.from_dict({**value, "use_cache": True, "dtype": "float32"})
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
