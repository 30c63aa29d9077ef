"""Lorica as a library: plans, simulated federations and studies, weightings, reducers, accounting, secure aggregation.

Each name is imported when it is first used, so `import lorica` takes no time and brings neither PyTorch nor gRPC.

Examples:
    >>> import lorica
    >>> [weighting.name for weighting in lorica.WEIGHTINGS]
    ['lorar', 'size', 'sqrt_size', 'loss_reduction', 'equal', 'fednova', 'q_fedavg']

    Reducers make the next model of the silos' deltas. One that is robust leaves out what is furthest off, here the
    smallest and the largest value of each parameter; a row of the tensor is the delta of one silo:

    >>> import torch
    >>> [reducer.name for reducer in lorica.REDUCERS][:5]
    ['plain', 'trimmed_mean', 'median', 'multi_krum', 'centred_clipping']
    >>> deltas = torch.tensor([[0.25, -9.0], [0.5, 0.5], [9.0, 0.75]])
    >>> lorica.trimmed_mean(deltas, 1, torch.empty(2)).tolist()
    [0.5, 0.5]

    What a thousand steps cost, each with noise of twice the bound, on a hundredth of the records drawn anew for each:

    >>> steps = lorica.accounting.GaussianRelease(noise_multiplier=2.0, sampling_rate=0.01, steps=1000)
    >>> round(lorica.accounting.epsilon_of([steps], dp_delta=1e-5), 1)
    0.6
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lorica import secure_aggregation
    from lorica.demo.silos.silos import write_silos
    from lorica.experiments.definition import Study
    from lorica.experiments.run import run_study as experiment
    from lorica.simulation.run import silos_in, simulate
    from lorica.simulation.simulated import Simulated
    from lorica_coordinator.aggregation.trimmed_mean import trimmed_mean
    from lorica_coordinator.edges.sums.reducers.chosen import REDUCERS
    from lorica_coordinator.edges.sums.reducers.reducer import Reducer
    from lorica_coordinator.plans.model_source import FolderModel, HubModel, SizedModel
    from lorica_coordinator.plans.plan_folder import create_plan
    from lorica_security.errors import LoricaError
    from lorica_security.privacy import accounting, ledger
    from silo_agent.training.tasks.text_task import TextTask
    from silo_wire.plans.plan import Plan, PlanBundle
    from silo_wire.weightings.named import WEIGHTINGS
    from silo_wire.weightings.weighting import Weighting

__all__ = [
    "REDUCERS",
    "WEIGHTINGS",
    "FolderModel",
    "HubModel",
    "LoricaError",
    "Plan",
    "PlanBundle",
    "Reducer",
    "Simulated",
    "SizedModel",
    "Study",
    "TextTask",
    "Weighting",
    "accounting",
    "create_plan",
    "experiment",
    "ledger",
    "secure_aggregation",
    "silos_in",
    "simulate",
    "trimmed_mean",
    "write_silos",
]

_WHERE: Final = {
    "REDUCERS": "lorica_coordinator.edges.sums.reducers.chosen:REDUCERS",
    "WEIGHTINGS": "silo_wire.weightings.named:WEIGHTINGS",
    "FolderModel": "lorica_coordinator.plans.model_source:FolderModel",
    "HubModel": "lorica_coordinator.plans.model_source:HubModel",
    "LoricaError": "lorica_security.errors:LoricaError",
    "Plan": "silo_wire.plans.plan:Plan",
    "PlanBundle": "silo_wire.plans.plan:PlanBundle",
    "Reducer": "lorica_coordinator.edges.sums.reducers.reducer:Reducer",
    "Simulated": "lorica.simulation.simulated:Simulated",
    "SizedModel": "lorica_coordinator.plans.model_source:SizedModel",
    "Study": "lorica.experiments.definition:Study",
    "TextTask": "silo_agent.training.tasks.text_task:TextTask",
    "Weighting": "silo_wire.weightings.weighting:Weighting",
    "accounting": "lorica_security.privacy.accounting",
    "create_plan": "lorica_coordinator.plans.plan_folder:create_plan",
    "experiment": "lorica.experiments.run:run_study",
    "ledger": "lorica_security.privacy.ledger",
    "secure_aggregation": "lorica.secure_aggregation",
    "silos_in": "lorica.simulation.run:silos_in",
    "simulate": "lorica.simulation.run:simulate",
    "trimmed_mean": "lorica_coordinator.aggregation.trimmed_mean:trimmed_mean",
    "write_silos": "lorica.demo.silos.silos:write_silos",
}
"""A module, or `module:name`."""


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'lorica' has no attribute {name!r}")
    module, _, inside = _WHERE[name].partition(":")
    found = import_module(module)
    return getattr(found, inside) if inside else found


def __dir__() -> list[str]:
    return sorted(__all__)
