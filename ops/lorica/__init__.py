"""Lorica as a library: plans, simulated federations and studies, weightings, accounting, secure aggregation.

Each name is imported when it is first used, so `import lorica` takes no time and brings neither PyTorch nor gRPC.

>>> import lorica
>>> [weighting.name for weighting in lorica.WEIGHTINGS]
['lorar', 'size', 'loss_reduction', 'equal', 'fednova']

What a thousand steps cost, each with noise of twice the bound, on a hundredth of the records drawn anew for each:

>>> steps = lorica.accounting.GaussianRelease(noise_multiplier=2.0, sampling_rate=0.01, steps=1000)
>>> round(lorica.accounting.epsilon_of([steps], dp_delta=1e-5), 1)
0.6
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from coordinator.plans.model_source import FolderModel, HubModel, SizedModel
    from coordinator.plans.plan_folder import create_plan
    from lorica import secure_aggregation
    from lorica.experiments.definition import Study
    from lorica.experiments.run import run_study as experiment
    from lorica.simulation.run import Simulated, silos_in, simulate
    from lorica_security.errors import LoricaError
    from lorica_security.privacy import accounting, ledger
    from silo_wire.plans.plan import Plan, PlanBundle
    from silo_wire.weightings.named import WEIGHTINGS
    from silo_wire.weightings.weighting import Weighting

__all__ = [
    "WEIGHTINGS",
    "FolderModel",
    "HubModel",
    "LoricaError",
    "Plan",
    "PlanBundle",
    "Simulated",
    "SizedModel",
    "Study",
    "Weighting",
    "accounting",
    "create_plan",
    "experiment",
    "ledger",
    "secure_aggregation",
    "silos_in",
    "simulate",
]

_WHERE: Final = {
    "WEIGHTINGS": "silo_wire.weightings.named",
    "FolderModel": "coordinator.plans.model_source",
    "HubModel": "coordinator.plans.model_source",
    "LoricaError": "lorica_security.errors",
    "Plan": "silo_wire.plans.plan",
    "PlanBundle": "silo_wire.plans.plan",
    "Simulated": "lorica.simulation.run",
    "SizedModel": "coordinator.plans.model_source",
    "Study": "lorica.experiments.definition",
    "Weighting": "silo_wire.weightings.weighting",
    "accounting": "lorica_security.privacy",
    "create_plan": "coordinator.plans.plan_folder",
    "experiment": "lorica.experiments.run:run_study",
    "ledger": "lorica_security.privacy",
    "secure_aggregation": "lorica",
    "silos_in": "lorica.simulation.run",
    "simulate": "lorica.simulation.run",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lorica' has no attribute {name!r}")
    module, _, other = _WHERE[name].partition(":")
    if name in ("accounting", "ledger", "secure_aggregation"):
        return import_module(f"{module}.{name}")
    return getattr(import_module(module), other or name)


def __dir__() -> list[str]:
    return sorted(__all__)
