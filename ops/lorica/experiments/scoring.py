"""Test scores of a simulation's best models, by the agents' own evaluation on each silo's test split; and how many of
the answers are right that silos without labels would be taught."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from lorica.simulation.model_files import round_file
from lorica.simulation.silo import settings_of
from lorica.simulation.simulated import Simulated
from lorica_coordinator.service.records import COMPLETED
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.service.ports import RoundModel
from silo_agent.training.data.text_to_sql_data import SiloData
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import judged_on
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.tasks.named import task_named
from silo_wire.plans.plan import PlanBundle

_POOL: Final = SiloName("pool")


@dataclass(frozen=True, slots=True)
class Scored:
    """By silo, of the best model by MicroAvg on dev and of the best one by MacroAvg; often these are one. `dev` is of
    the first, where the task knows parts of an answer; it chose that model, so that it flatters it."""

    by_micro: dict[str, dict[str, Any]]
    by_macro: dict[str, dict[str, Any]]
    dev: dict[str, dict[str, Any]]


def scores(
    simulated: Simulated,
    silos: Mapping[SiloName, Path],
    settings: DeviceSettings,
    *,
    work: Path,
    only: Collection[str] = (),
) -> Scored:
    """Of each silo, or of those named in `only`: fractions from 0 to 1, loss in nats of a target token;
    `execution_accuracy` where there is a database, of the `executed` examples whose own query it could run. `right` has
    a character for each question, in an order that is the same for all runs of a study: 1 where the answer is exact."""
    bundle, model = _model(simulated, settings, work)
    chosen = {silo: folder for silo, folder in silos.items() if not only or silo in only}

    def of(one: RoundModel, split: Literal["dev", "test"]) -> dict[str, dict[str, Any]]:
        found = (
            (silo, _score(one, bundle, model, silo, folder, settings, work, split)) for silo, folder in chosen.items()
        )
        return {silo: score for silo, score in found if score is not None}

    best = round_file(simulated.coordinator.models(bundle), simulated.best, work / "scored.model")
    by_micro = of(best, "test")
    kept = simulated.kept.best(bundle.model_layout)
    same = kept is None or kept.manifest.digest == simulated.best
    knows_parts = len(task_named(bundle.plan.task.kind).metrics) > 1
    return Scored(
        by_micro,
        by_micro if kept is None or same else of(kept, "test"),
        of(best, "dev") if knows_parts else {},
    )


def _model(simulated: Simulated, settings: DeviceSettings, work: Path) -> tuple[PlanBundle, PlanModel]:
    coordinator = simulated.coordinator
    bundle = coordinator.shelf.bundle(simulated.plan)
    bases = coordinator.base(bundle)
    base = None if bases is None else round_file(bases, bases.initial(), work / "base.model")
    return bundle, PlanModel(bundle, settings, base=base)


def _score(
    best: RoundModel,
    bundle: PlanBundle,
    model: PlanModel,
    silo: SiloName,
    folder: Path,
    settings: DeviceSettings,
    work: Path,
    split: Literal["dev", "test"],
) -> dict[str, Any] | None:
    """None where the silo has no labels."""
    sources = SiloSources(
        settings_of(folder, device=settings.device, threads=settings.threads), work / "scratch" / silo
    )
    if not sources.data().labelled:
        return None
    trainer = SiloTrainer(bundle, sources.data(), silo, settings, model=model)
    truths: list[tuple[float, ...]] = []
    parts: dict[str, float] = {}
    with judged_on(sources.database(), sources.limits()) as same_result:
        score = trainer.evaluate(
            model_path=best.file,
            model=best.manifest,
            split=split,
            most=0,
            same_result=same_result,
            on_parts=parts.update,
            on_truths=truths.extend,
        )
    found: dict[str, Any] = {
        "examples": score.examples,
        "exact_match": score.exact_matches / score.examples,
        "loss_per_token": score.loss_per_token,
        "right": "".join("01"[whole >= 1.0] for whole, *_ in truths),
    }
    if len(parts) > 1:
        found |= {name: count / score.examples for name, count in parts.items()}
    if score.executed:
        found |= {"executed": score.executed, "execution_accuracy": score.execution_matches / score.executed}
    return found


def pseudo_labels(
    simulated: Simulated,
    silos: Mapping[SiloName, Path],
    settings: DeviceSettings,
    *,
    work: Path,
    pupils: Collection[SiloName],
    most: int,
) -> list[dict[str, Any]]:
    """Of each model that silos without labels train from, or would, were there rounds of theirs: the round that made
    it, and the fraction of its greedy answers that are right among `most` training questions of `pupils`, dealt from
    one after the other, whose own answers are read here and nowhere else.

    A teacher is that model, as its round begins. Raises ConfigurationError where pupils have no questions.
    """
    bundle, model = _model(simulated, settings, work)
    task = task_named(bundle.plan.task.kind)
    found = [task.data(silos[silo]) for silo in sorted(pupils)]
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*(one.train for one in found)))
    asked = tuple(itertools.islice((example for example in rounds if example is not None), most))
    if not asked:
        raise ConfigurationError("pseudo_labels is of silos without labels, and no plan of the study names one")
    data = _pool(found, asked)
    trainer = SiloTrainer(bundle, data, _POOL, settings, model=model)
    who = bundle.plan.semi_supervised.who_trains
    lines = []
    for row in simulated.rows:
        if row.outcome not in COMPLETED or who.unlabelled_round(row.round):
            continue
        one = simulated.kept.model(row.model, bundle.model_layout)
        score = trainer.evaluate(model_path=one.file, model=one.manifest, split="test", most=0)
        lines.append({"round": row.round, "right": score.exact_matches / score.examples})
    return lines


def _pool(found: Sequence[SiloData], asked: tuple[Any, ...]) -> SiloData:
    schemas = {schema.db_id: schema for one in found for schema in one.schemas}
    first, *further = (schemas[name] for name in dict.fromkeys(example.db_id for example in asked))
    return replace(found[0], train=(), dev=(), test=asked, schema=first, further_schemas=tuple(further))
