"""Test scores of a simulation's best models, by the agents' own evaluation on each silo's test split."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorica.simulation.model_files import round_file
from lorica.simulation.silo import settings_of
from lorica.simulation.simulated import Simulated
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.service.ports import RoundModel
from silo_agent.sql_sandbox import Sandbox
from silo_agent.training.data.serialisation import exact_match
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import in_sandbox
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.plans.plan import PlanBundle


@dataclass(frozen=True, slots=True)
class Scored:
    """By silo, of the best model by MicroAvg on dev and of the best one by MacroAvg; often these are one."""

    by_micro: dict[str, dict[str, Any]]
    by_macro: dict[str, dict[str, Any]]


def scores(simulated: Simulated, silos: Mapping[SiloName, Path], settings: DeviceSettings, *, work: Path) -> Scored:
    """Of each silo: fractions from 0 to 1, loss in nats of a target token; `execution_accuracy` where there is a
    database, of the `executed` examples whose own query it could run. `right` has a character for each question, in an
    order that is the same for all runs of a study: 1 where the answer is exact."""
    coordinator = simulated.coordinator
    bundle = coordinator.shelf.bundle(simulated.plan)
    bases = coordinator.base(bundle)
    base = None if bases is None else round_file(bases, bases.initial(), work / "base.model")
    model = PlanModel(bundle, settings, base=base)

    def of(one: RoundModel) -> dict[str, dict[str, Any]]:
        found = ((silo, _score(one, bundle, model, silo, folder, settings, work)) for silo, folder in silos.items())
        return {silo: score for silo, score in found if score is not None}

    best = round_file(coordinator.models(bundle), simulated.best, work / "scored.model")
    by_micro = of(best)
    kept = simulated.kept.best(bundle.model_layout)
    same = kept is None or kept.manifest.digest == simulated.best
    return Scored(by_micro, by_micro if kept is None or same else of(kept))


def _score(
    best: RoundModel,
    bundle: PlanBundle,
    model: PlanModel,
    silo: SiloName,
    folder: Path,
    settings: DeviceSettings,
    work: Path,
) -> dict[str, Any] | None:
    """None where the silo has no labels."""
    sources = SiloSources(
        settings_of(folder, device=settings.device, threads=settings.threads), work / "scratch" / silo
    )
    if not sources.data().labelled:
        return None
    trainer = SiloTrainer(bundle, sources.data(), silo, settings, model=model)
    target = sources.database()
    right: list[bool] = []
    with ExitStack() as open_here:
        same = None if target is None else in_sandbox(open_here.enter_context(Sandbox(target, sources.limits())))

        def note(gold: str, predicted: str) -> bool | None:
            right.append(exact_match(predicted, gold))
            return None if same is None else same(gold, predicted)

        parts: dict[str, float] = {}
        score = trainer.evaluate(
            model_path=best.file, model=best.manifest, split="test", most=0, same_result=note, on_parts=parts.update
        )
    found: dict[str, Any] = {
        "examples": score.examples,
        "exact_match": score.exact_matches / score.examples,
        "loss_per_token": score.loss_per_token,
    }
    if right:  # else nobody asked for results
        found["right"] = "".join("01"[it] for it in right)
    if len(parts) > 1:
        found |= {name: count / score.examples for name, count in parts.items()}
    if score.executed:
        found |= {"executed": score.executed, "execution_accuracy": score.execution_matches / score.executed}
    return found
