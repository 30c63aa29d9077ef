"""How much room a plan takes below the coordinator's state folder."""

from typing import Final

from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.plan_optimizer import optimizer_of
from silo_wire.server_step.server_optimizer import slots

MODELS_KEPT: Final = 4
"""Of each plan, with the optimizer's state: as federation.toml says of `state`."""


def plan_disk(bundle: PlanBundle, silos: int) -> int:
    """Bytes: an update of each silo, models with the server optimizer's state, what adapters are for.

    Under masks there is another update of each, and another model: what the present model is checked with.
    """
    masked = bundle.plan.aggregation.secure_aggregation
    layout = bundle.layout
    master = bundle.model_layout.dtype != layout.dtype
    section = bundle.plan.aggregation
    state = len(slots(optimizer_of(section))) + len(section.carried) + master
    base = bundle.base_layout.total_bytes if bundle.base_layout else 0
    return (
        silos * bundle.update_bytes * (1 + masked)
        + (MODELS_KEPT + masked) * (bundle.model_layout.total_bytes + state * layout.total_bytes)
        + base
    )
