"""What a plan with silo-level privacy lacks, all of it at once: its keys lie in four sections, and whoever is told of
one more by each refusal gives up."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from lorica_security.errors import ConfigurationError
from silo_wire.plans.plan import Plan
from silo_wire.plans.privacy import calibrated_noise
from silo_wire.plans.sizes import Size

_OFF: Final = (
    ("evaluation", "every", 0),
    ("evaluation", "initial", False),
    ("evaluation", "last", False),
    ("aggregation", "max_weight_share", 0),
    ("wire", "update", "float32"),
)
_LEAST_MASKED: Final = 3


def most_parameters(size: Size, vocabulary: int | None = None) -> int:
    """Of a model of this size: its tokenizer may have fewer pieces."""
    inner, layers = size.heads * size.d_kv, size.layers
    feed_forward = (3 if size.gated else 2) * size.d_model * size.d_ff
    encoder = 4 * size.d_model * inner + feed_forward + 2 * size.d_model
    decoder = 8 * size.d_model * inner + feed_forward + 3 * size.d_model
    positions, norms = 2 * 32 * size.heads, 2 * size.d_model
    return (vocabulary or size.vocabulary) * size.d_model + layers * (encoder + decoder) + positions + norms


def lacking(values: Mapping[str, Any], drafted: Callable[[Mapping[str, object]], Plan], parameters: int) -> str:
    """As options of `plan new`, what `values` take to be a plan, where that is silo-level privacy's; else "".

    `drafted` makes a plan of them with these put in place, by dotted keys, and raises ConfigurationError; `parameters`:
    as many as the model has at most, 0 where that is not known.
    """
    if values.get("privacy", {}).get("level") != "silo":
        return ""
    aggregation: Mapping[str, Any] = values.get("aggregation", {})
    wanted: dict[str, object] = {}
    for section, key, needed in _OFF:
        usual = getattr(Plan.model_fields[section].default, key)
        if values.get(section, {}).get(key, usual) != needed:
            wanted[f"{section}.{key}"] = needed
    if not aggregation.get("max_weight"):
        wanted["aggregation.weighting"] = "equal"
    if aggregation.get("secure_aggregation") and values.get("schedule", {}).get("min_silos", 0) < _LEAST_MASKED:
        wanted["schedule.min_silos"] = _LEAST_MASKED
    try:
        plan = drafted(wanted)
        privacy = plan.privacy
        if not privacy.noise_multiplier:
            noise = calibrated_noise(privacy, rounds=plan.schedule.rounds, weighted=plan.weighted)
            privacy = privacy.model_copy(update={"noise_multiplier": noise})
        if (silos := privacy.silos_for(parameters)) > privacy.nominal_silos:
            wanted["privacy.nominal_silos"] = silos
            drafted(wanted)
    except ConfigurationError:
        return ""  # something else is wrong as well, which is said
    return " ".join(f"--set {key}={_shown(value)}" for key, value in wanted.items())


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
