"""What goes with silos without labels: each cell is what a plan with both comes to."""

from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from lorica.documentation.markdown import markdown_table
from silo_wire.canonical import digest_of
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.model import BASE_LAYOUT_FILE

Sections = Mapping[str, Mapping[str, Any]]

WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "in turn, from a teacher": {"order": "alternate", "teacher": "ema"},
    "in turn, filling in": {"order": "alternate", "teacher": "mlm"},
    "together, from a teacher": {"order": "together", "teacher": "ema"},
    "together, filling in": {"order": "together", "teacher": "mlm"},
    "not at all": {"teacher": "none"},
}
"""How silos without labels train."""
_MASKED: Final[Sections] = {"aggregation": {"secure_aggregation": True, "max_weight": 500.0}, "training": {"epochs": 2}}
_NO_SCORES: Final = {"every": 0, "initial": False, "last": False}
BESIDE: Final[Mapping[str, Sections]] = {
    '`aggregation.weighting = "equal"`, `"size"`': {"aggregation": {"weighting": "size"}},
    'weights by loss (`"lorar"`, `"loss_reduction"`, `"q_fedavg"`), FedNova': {"aggregation": {"weighting": "lorar"}},
    "`aggregation.secure_aggregation`": _MASKED,
    "the same with `min_confidence` above 0": {**_MASKED, "semi_supervised": {"min_confidence": 0.5}},
    'the same with `filter` other than `"none"`': {**_MASKED, "semi_supervised": {"filter": "executes"}},
    "`aggregation.momentum` above 0, another server optimizer": {"aggregation": {"momentum": 0.9}},
    "`aggregation.server_learning_rate` or `server_rate_at_end` other than 1": {
        "aggregation": {"server_rate_at_end": 0.5}
    },
    "a robust reducer": {"aggregation": {"reducer": "median"}},
    "FedExP": {"aggregation": {"step_length": "fedexp"}},
    "drift corrections": {
        "training": {"drift_correction": "scaffold", "optimizer": "sgd", "steps": 4, "dropout": 0.0},
        "aggregation": {"max_delta_norm": 0.0},
    },
    "`training.fedprox_mu`": {"training": {"fedprox_mu": 0.01}},
    '`adapters.train = "b"`': {"adapters": {"rank": 4, "train": "b"}},
    '`adapters.train = "both"`': {"adapters": {"rank": 4}},
    '`adapters.train = "alternate"`': {"adapters": {"rank": 4, "train": "alternate"}},
    '`adapters.train = "reproject"`': {"adapters": {"rank": 4, "train": "reproject"}},
    '`wire.update = "bfloat16"`': {"wire": {"update": "bfloat16"}},
    '`wire.update = "int8"`': {"wire": {"update": "int8"}},
    '`privacy.level = "silo"`': {
        "privacy": {"level": "silo", "noise_multiplier": 1.0},
        "aggregation": {"max_delta_norm": 1.0},
        "evaluation": _NO_SCORES,
    },
    '`privacy.level = "record"`': {
        "privacy": {"level": "record", "noise_multiplier": 1.0},
        "training": {"dropout": 0.0},
        "evaluation": _NO_SCORES,
    },
}


def semi_supervised_table() -> str:
    rows = [(name, *("yes" if goes(way, beside) else "no" for way in WAYS.values())) for name, beside in BESIDE.items()]
    return markdown_table(("beside silos without labels that train", *WAYS), rows)


def goes(way: Mapping[str, Any], beside: Sections) -> bool:
    """Whether there is a plan of both; without such silos there has to be one, or its ValidationError is raised."""
    own = {key: value for key, value in beside.items() if key != "semi_supervised"}
    Plan.model_validate({**_values({}, own), "semi_supervised": {}})
    try:
        Plan.model_validate(_values(way, beside))
    except ValidationError:
        return False
    return True


def _values(way: Mapping[str, Any], beside: Sections) -> dict[str, Any]:
    digest = digest_of(b"example")
    adapters = beside.get("adapters", {})
    model: dict[str, Any] = {
        "source": "example",
        "parameters": 1000,
        "layout": digest,
        "initial": digest,
        "files": dict.fromkeys(("config.json", "layout.json", *((BASE_LAYOUT_FILE,) if adapters else ())), digest),
        **({"base": digest} if adapters else {}),
        **({"fixed": digest} if adapters.get("train") == "b" else {}),
    }
    turns = way.get("order") == "alternate"
    sections: dict[str, dict[str, Any]] = {
        "schedule": {"rounds": 20, "min_silos": 5},
        "aggregation": {"weighting": "equal", "momentum": 0.0},
        "semi_supervised": {"unlabelled": ["ward-*"], **({"min_labelled": 3} if turns else {}), **way},
    }
    for name, changes in beside.items():
        sections[name] = {**sections.get(name, {}), **changes}
    return {"name": "example", "federation": "example", "model": model, **sections}
