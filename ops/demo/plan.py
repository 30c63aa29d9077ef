"""The demo's plan: arguments of `coordinator plan new`."""

from collections.abc import Mapping

PLAN_NAME = "demo"

_VALUES: Mapping[str, object] = {
    "schedule.rounds": 28,
    "schedule.min_silos": 4,
    "schedule.start_when_ready": "true",
    "aggregation.momentum": 0.5,
    "training.learning_rate": 2.5e-3,
    "training.learning_rate_schedule": "linear",
    "training.loss_log_steps": 4,
    "training.dropout": 0.0,
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

DEMO_PLAN = (
    *("--size", "mini"),
    *(argument for key, value in _VALUES.items() for argument in ("--set", f"{key}={value}")),
)
