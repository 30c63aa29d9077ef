"""What does not go with adapters whose products are averaged: `[adapters] train = "reproject"`."""

from collections.abc import Iterator
from typing import Any

from silo_wire.plans.plan_values import PlanValues
from silo_wire.plans.robust import MEAN
from silo_wire.weightings.fednova import FEDNOVA


def of_reprojection(plan: PlanValues) -> Iterator[str]:
    """Each key, with what to do; nothing where products are not averaged."""
    if not plan.adapters.reprojects:
        return
    server, text = plan.aggregation, '"{}"'.format
    after_a_cut = "which makes the next model itself, on axes that are new in each round"
    sums = "where nobody has the product of a single silo's halves"
    key_by_key: tuple[tuple[bool, str, Any, str, str], ...] = (
        (server.secure_aggregation, "[aggregation] secure_aggregation", "true", "false", sums),
        (
            plan.privacy.level != "none",
            "[privacy] level",
            text(plan.privacy.level),
            text("none"),
            "whose noise would be multiplied with itself",
        ),
        (server.reducer != MEAN, "[aggregation] reducer", text(server.reducer), text(MEAN), "which is a mean"),
        (
            server.weighting == FEDNOVA.name,
            "[aggregation] weighting",
            text(server.weighting),
            text("size"),
            "whose length is one of deltas, and not of products",
        ),
        (
            server.server_optimizer != "sgd",
            "[aggregation] server_optimizer",
            text(server.server_optimizer),
            text("sgd"),
            after_a_cut,
        ),
        (
            server.server_learning_rate != 1.0,
            "[aggregation] server_learning_rate",
            f"{server.server_learning_rate:g}",
            "1.0",
            after_a_cut,
        ),
        (
            server.server_rate_at_end != 1.0,
            "[aggregation] server_rate_at_end",
            f"{server.server_rate_at_end:g}",
            "1.0",
            after_a_cut,
        ),
        (server.momentum != 0.0, "[aggregation] momentum", f"{server.momentum:g}", "0.0", after_a_cut),
        (
            server.step_length != "fixed",
            "[aggregation] step_length",
            text(server.step_length),
            text("fixed"),
            after_a_cut,
        ),
        (
            plan.wire.update != "float32",
            "[wire] update",
            text(plan.wire.update),
            text("float32"),
            "since what rounding cuts off at a silo is of the axes of its round",
        ),
    )
    for wrong, key, value, needed, why in key_by_key:
        if wrong:
            yield (
                f'{key} = {value} does not go with [adapters] train = "reproject", {why}: set it to {needed}, or train '
                'to "b" or "alternate", whose mean is exact, or to "both"'
            )
