"""What `coordinator plan new` says of private plans, by example."""

from collections.abc import Iterator
from typing import Any

from lorica_coordinator.plans.forecast import forecast, require_worth
from lorica_security.errors import ConfigurationError
from silo_wire.canonical import digest_of
from silo_wire.plans.plan import Plan
from silo_wire.plans.privacy import calibrated_noise

# --- what a private plan is worth


def forecast_examples() -> str:
    """What `coordinator plan new` prints for plans of a T5-small-like size, and for an adapter's."""
    examples = (
        ("a T5-small, noise at the coordinator, 20 rounds", "silo", 60_506_624, False, 20_000),
        ("100,000 parameters, noise at 200 silos, 20 rounds", "silo", 100_000, True, 200),
        ("records, weights by loss reduction, 20 rounds", "record", 60_506_624, False, 100),
    )
    blocks = []
    for title, level, parameters, masked, silos in examples:
        plan = _example(level, parameters, masked, silos)
        blocks.append("\n".join((f"# {title}", *forecast(plan), *_refusal(plan))))
    return "```text\n" + "\n\n".join(blocks) + "\n```\n"


def _example(level: str, parameters: int, masked: bool, silos: int) -> Plan:
    digest = digest_of(b"example")
    values: dict[str, Any] = {
        "name": "example",
        "federation": "example",
        "model": {
            "source": "example",
            "parameters": parameters,
            "layout": digest,
            "initial": digest,
            "files": {"config.json": digest, "layout.json": digest},
        },
        "schedule": {"rounds": 20, "min_silos": 100},
        "aggregation": {"max_weight": 500.0, "max_delta_norm": 1.0, "secure_aggregation": masked},
        "training": {"dropout": 0.0},
        "evaluation": {"every": 0, "initial": False, "last": False},
        "privacy": {"level": level, "nominal_silos": silos, "nominal_records": 400, "expected_batch_size": 40},
    }
    draft = Plan.model_validate(values)
    noise = calibrated_noise(draft.privacy, rounds=draft.schedule.rounds, weighted=draft.weighted)
    values["privacy"]["noise_multiplier"] = round(noise * 1.001, 3)
    return Plan.model_validate(values)


def _refusal(plan: Plan) -> Iterator[str]:
    try:
        require_worth(plan, "plan example")
    except ConfigurationError as error:
        yield f"error: {error}"
