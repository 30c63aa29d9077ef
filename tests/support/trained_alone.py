"""What a silo of a federation would have sent for its first round, had one process trained it."""

from pathlib import Path

from lorica_security.identifiers import SiloName
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.own_entropy import own_entropy
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.ports import RoundModel
from silo_agent.settings import Settings
from silo_wire.canonical import Digest
from silo_wire.manifest import manifest_of
from silo_wire.messages import RoundKey
from silo_wire.plans.plan import PlanBundle
from tests.support.federation import Federation


def folder_of(it: Federation, silo: SiloName) -> SiloFolder:
    return SiloFolder(it.root / "agents" / silo)


def bundle_at(it: Federation, silo: SiloName) -> PlanBundle:
    status, _ = it.view().look()
    bundle = PlanStore(folder_of(it, silo).plans).load(Digest(status.plan_digest.hex()))
    assert bundle is not None
    return bundle


def first_model(it: Federation, silo: SiloName) -> Path:
    """The plan's initial model, as the silo has it."""
    bundle, models = bundle_at(it, silo), folder_of(it, silo).models
    (found,) = (
        path
        for path in vectors(models, bundle.layout.total_bytes)
        if manifest_of(bundle.layout, [path.read_bytes()]).digest == bundle.plan.model.initial
    )
    return found


def vectors(folder: Path, size: int) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size == size]


def update_alone(it: Federation, silo: SiloName, scratch: Path) -> Path:
    kept, bundle, model = folder_of(it, silo), bundle_at(it, silo), first_model(it, silo)
    settings = Settings.model_validate(
        {"data": {"folder": str(it.data[silo])}, "training": {"device": "cpu", "threads": 1}}
    )
    one = Workshop(
        settings=settings,
        policy=SiloPolicy(rules=settings.policy, silo=silo),
        sources=SiloSources(settings, scratch / f"{silo}-scratch"),
        own_entropy=own_entropy(kept.own_entropy),
    )
    one.prepare(bundle, None)
    update = scratch / f"{silo}-update"
    one.train(
        bundle=bundle,
        key=RoundKey(federation=bundle.plan.federation, plan=bundle.plan.digest, round=1, attempt=1),
        model=RoundModel(file=model, manifest=manifest_of(bundle.layout, [model.read_bytes()])),
        update_file=update,
        included_update=None,
        told_before=None,
        checkpoint_file=scratch / f"{silo}-checkpoint",
        progress=lambda fraction: None,
        notice=lambda event, detail: None,
        cancelled=lambda: False,
    )
    return update
