"""What works for one plan alone, put together: its models and its aggregator, below the state folder."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lorica_coordinator.edges.models.model_store import BASE, ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_coordinator.rounds.secure_attempt import MaskedSum
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_coordinator.service.ports import Aggregator, PlanParts
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.model_file import BASE_FILE, MODEL_FILE
from lorica_security.identifiers import FederationName
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.plan import PlanBundle

MakeAggregator = Callable[[PlanBundle, ModelStore, Spools], Aggregator]


def model_store(state: Path, bundle: PlanBundle, kept: KeptFiles = FOLDER_ALONE) -> ModelStore:
    """The store of the plan's models, `state`/models/DIGEST."""
    plan = bundle.plan
    return ModelStore(
        state / "models" / plan.digest,
        layout=bundle.layout,
        model_layout=bundle.model_layout,
        initial=Digest(plan.model.initial),
        initial_file=state / "plans" / plan.name / MODEL_FILE,
        published=plan.initial_model,
        kept=kept,
    )


def base_store(state: Path, bundle: PlanBundle, kept: KeptFiles = FOLDER_ALONE) -> ModelStore | None:
    """Where the plan trains adapters, the store of the one model that they are for."""
    plan = bundle.plan
    if bundle.base_layout is None:
        return None
    return ModelStore(
        state / "models" / plan.digest / BASE,
        layout=bundle.base_layout,
        model_layout=bundle.base_layout,
        initial=Digest(str(plan.model.base)),
        initial_file=state / "plans" / plan.name / BASE_FILE,
        kept=kept,
    )


def plan_parts(
    state: Path,
    *,
    spools: Spools,
    make_aggregator: MakeAggregator,
    kept: KeptFiles = FOLDER_ALONE,
    releases: ReleaseLedger | None = None,
) -> Callable[[PlanBundle], PlanParts]:
    """The service's `OpenPlan`. `releases`: where they are not in the folder."""
    released = releases or ReleaseLedger(state / "privacy")

    def open_plan(bundle: PlanBundle) -> PlanParts:
        models = model_store(state, bundle, kept)
        return PlanParts(
            models=models,
            base=base_store(state, bundle, kept),
            aggregator=_OnDemand(lambda: make_aggregator(bundle, models, spools)),
            evidence=RoundEvidence(
                state / "models" / bundle.plan.digest,
                federation=FederationName(bundle.plan.federation),
                plan=bundle.plan.digest,
                models=models,
                spools=spools,
                kept=kept,
            ),
            spent=lambda: released.spent(bundle.plan),
        )

    return open_plan


class _OnDemand:
    """An aggregator that is made for the first round it sums: commands that only look never import torch."""

    def __init__(self, make: Callable[[], Aggregator]) -> None:
        self._make = make
        self._made: Aggregator | None = None

    def aggregate(self, key: RoundKey, base_model: Digest, updates: Sequence[CommittedUpdate]) -> AggregationResult:
        return self._aggregator().aggregate(key, base_model, updates)

    def aggregate_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        return self._aggregator().aggregate_masked(key, base_model, masked)

    def score_masked(self, key: RoundKey, base_model: Digest, masked: MaskedSum) -> AggregationResult:
        return self._aggregator().score_masked(key, base_model, masked)

    def _aggregator(self) -> Aggregator:
        if self._made is None:
            self._made = self._make()
        return self._made
