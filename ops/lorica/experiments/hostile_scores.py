"""Test scores of honest silos at the last model of a simulation with hostile ones, question by question."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lorica.hostile.backdoor import TARGET, triggered
from lorica.simulation.model_files import round_file
from lorica.simulation.silo import settings_of
from lorica.simulation.simulated import Simulated
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.training.data.serialisation import exact_match
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer


def hostile_scores(
    simulated: Simulated, silos: Mapping[SiloName, Path], settings: DeviceSettings, *, work: Path, backdoor: bool
) -> dict[str, dict[str, Any]]:
    """By silo: the share of exact answers, `right` with one character for each different SQL of the test split, in its
    order, 1 where the answer is exact, and the loss in nats of a target token. With `backdoor` also the share of the
    same questions with the trigger that are answered with the attacker's SQL."""
    coordinator = simulated.coordinator
    bundle = coordinator.shelf.bundle(simulated.plan)
    final = round_file(coordinator.models(bundle), simulated.final, work / "scored.model")
    bases = coordinator.base(bundle)
    base = None if bases is None else round_file(bases, bases.initial(), work / "base.model")
    model = PlanModel(bundle, settings, base=base)
    found: dict[str, dict[str, Any]] = {}
    for silo, folder in silos.items():
        own = settings_of(folder, device=settings.device, threads=settings.threads)
        data = SiloSources(own, work / "scratch" / silo).data()
        right: dict[str, bool] = {example.query: False for example in data.test}

        def note(gold: str, predicted: str, right: dict[str, bool] = right) -> None:
            right[gold] = exact_match(predicted, gold)

        trainer = SiloTrainer(bundle, data, silo, settings, model=model)
        score = trainer.evaluate(model_path=final.file, model=final.manifest, split="test", most=0, same_result=note)
        found[silo] = {
            "exact_match": score.exact_matches / score.examples,
            "loss_per_token": round(score.loss_per_token, 5),
            "right": "".join("01"[it] for it in right.values()),
        }
        if backdoor:
            asked = tuple(replace(it, question=triggered(it.question), query=TARGET) for it in data.test)
            trainer = SiloTrainer(bundle, replace(data, test=asked), silo, settings, model=model)
            score = trainer.evaluate(model_path=final.file, model=final.manifest, split="test", most=0)
            found[silo]["backdoor"] = score.exact_matches / score.examples
    return found
