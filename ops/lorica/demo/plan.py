"""The demo's plan: arguments of `coordinator plan new`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PLAN_NAME = "demo"
SIZE = "mini"

_VALUES: Mapping[str, object] = {
    "schedule.rounds": 28,
    "schedule.min_silos": 4,
    "schedule.start_when_ready": "true",
    "aggregation.momentum": 0.5,
    "training.learning_rate": 2.5e-3,
    "training.learning_rate_schedule": "linear",
    "training.dropout": 0.0,
    # Evaluated reductions are near nothing once silos have learnt, and their shares swing from round to round.
    "training.loss_reduction": "logged",
    "training.loss_log_steps": 4,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 64,
    "training.max_output_tokens": 64,
    # A small silo passes over its examples more often, so that all four move the model by like distances.
    "training.overrides.hospital.epochs": 1,
    "training.overrides.hospital.batch_size": 32,
    "training.overrides.bank.epochs": 2,
    "training.overrides.bank.batch_size": 32,
    "training.overrides.insurer.epochs": 2,
    "training.overrides.insurer.batch_size": 16,
    "training.overrides.clinic.epochs": 4,
    "training.overrides.clinic.batch_size": 16,
    "evaluation.every": 4,
    "evaluation.batch_size": 64,
}


_PRIVATE_VALUES: Mapping[str, object] = {
    "schedule.rounds": 5,
    "schedule.start_when_ready": True,
    "aggregation.momentum": 0.0,
    "adapters.rank": 8,
    "training.epochs": 1,
    "training.learning_rate": 1e-2,
    "training.batch_size": 128,
    "training.max_grad_norm": 0.5,
    "training.dropout": 0.0,
    "training.schema_in_input": False,
    "training.max_input_tokens": 64,
    "training.max_output_tokens": 64,
    "privacy.level": "record",
    "privacy.expected_batch_size": 256,
    "privacy.steps": 8,
    "privacy.loss_bound": 4.0,
    "evaluation.every": 0,
    "evaluation.initial": False,
    "evaluation.last": False,
}
PRIVATE_RECORDS = 4000
"""Of each silo in the private demo."""
ROOM_FOR_THE_FILTER = 1.5
"""`[policy] max_epsilon` over the plan's epsilon: a silo's budget holds over plans that are chosen later, which costs
more than one plan."""


def set_arguments(values: Mapping[str, object]) -> Iterator[str]:
    """Of `coordinator plan new`; of a key that is given twice the last counts."""
    for key, value in values.items():
        yield from ("--set", f"{key}={json.dumps(value) if isinstance(value, list | bool) else value}")


DEMO_PLAN = (*("--size", SIZE), *set_arguments(_VALUES))
MASKED_PLAN = (
    *("--size", SIZE),
    *set_arguments({key: value for key, value in _VALUES.items() if not key.startswith("training.overrides.")}),
    *set_arguments({"aggregation.max_weight": 1000.0}),
)
"""Without overrides, which silos refuse under masks, and with a cap on weights, which masked sums need."""


def private_plan(model: Path, *, silos: int, records: int, epsilon: float) -> Sequence[str]:
    """From the public `model`, for `silos` of `records` records each."""
    return (
        *("--model", str(model)),
        *set_arguments(private_values(silos=silos, records=records, epsilon=epsilon)),
    )


def private_values(*, silos: int, records: int, epsilon: float) -> Mapping[str, object]:
    """What the plan of `private_plan` says otherwise than the preset."""
    own = {
        "schedule.min_silos": silos,
        "aggregation.max_weight": records * float(str(_PRIVATE_VALUES["privacy.loss_bound"])),
        "privacy.nominal_records": records,
        "privacy.target_epsilon": epsilon,
    }
    return {**_PRIVATE_VALUES, **own}
