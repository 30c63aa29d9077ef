"""Test scores of a simulation's best model, by the agents' own evaluation on each silo's test split."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from lorica.simulation.round_file import round_file
from lorica.simulation.silo import settings_of
from lorica.simulation.simulated import Simulated
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.sql_sandbox import Sandbox
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import in_sandbox
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer


def scores(
    simulated: Simulated, silos: Mapping[SiloName, Path], settings: DeviceSettings, *, work: Path
) -> dict[str, dict[str, float]]:
    """By silo: fractions from 0 to 1, loss in nats of a target token; `execution_accuracy` where there is a database,
    of the `executed` examples whose own query it could run."""
    coordinator = simulated.coordinator
    bundle = coordinator.shelf.bundle(simulated.plan)
    models = coordinator.models(bundle)
    best = round_file(models, simulated.best, work / "scored.model")
    bases = coordinator.base(bundle)
    base = None if bases is None else round_file(bases, bases.initial(), work / "base.model")
    model = PlanModel(bundle, settings, base=base)
    found: dict[str, dict[str, float]] = {}
    for silo, folder in silos.items():
        sources = SiloSources(
            settings_of(folder, device=settings.device, threads=settings.threads), work / "scratch" / silo
        )
        if not sources.data().labelled:
            continue
        trainer = SiloTrainer(bundle, sources.data(), silo, settings, model=model)
        target = sources.database()
        with ExitStack() as open_here:
            same = None if target is None else in_sandbox(open_here.enter_context(Sandbox(target, sources.limits())))
            parts: dict[str, int] = {}
            score = trainer.evaluate(
                model_path=best.file,
                model=best.manifest,
                split="test",
                most=0,
                same_result=same,
                on_parts=parts.update,
            )
        found[silo] = {
            "examples": score.examples,
            "exact_match": score.exact_matches / score.examples,
            "loss_per_token": score.loss_per_token,
        }
        if len(parts) > 1:
            found[silo] |= {name: count / score.examples for name, count in parts.items()}
        if score.executed:
            found[silo] |= {
                "executed": score.executed,
                "execution_accuracy": score.execution_matches / score.executed,
            }
    return found
