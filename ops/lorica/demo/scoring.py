"""Held-out scores of the first and the final model, by the agents' own evaluation on each silo's test split."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from lorica.simulation.simulated import Simulated
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.opened import Coordinator
from silo_agent.service.ports import RoundModel
from silo_agent.sql_sandbox import Limits, SqliteTarget
from silo_agent.training.data.text_to_sql_data import load_silo_data
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import judged_on
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation


@dataclass(frozen=True, slots=True)
class Score:
    """Fractions, 0 to 1, and the mean loss of a target token."""

    questions: int
    exact_match: float
    execution_accuracy: float
    loss_per_token: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Score":
        return cls(
            evaluation.examples,
            evaluation.exact_matches / evaluation.examples,
            evaluation.execution_matches / max(1, evaluation.executed),
            evaluation.loss_per_token,
        )


Scores = dict[str, Score]
Scoring = Callable[[Path, Digest, Digest, Mapping[str, Path]], tuple[Scores, Scores]]
"""(the coordinator's folder, plan, final model, each silo's data) -> its scores with the plan's initial model, and with
the final one."""


class PlanModels:
    """Models of a plan that is finished, as files in `folder`, and the agents' own trainers for them."""

    def __init__(self, coordinator: Coordinator | Path, plan: Digest, folder: Path) -> None:
        """`coordinator` is one that is open, or the folder of one."""
        parts = Coordinator.load(CoordinatorFolder(coordinator)) if isinstance(coordinator, Path) else coordinator
        self._bundle, self._folder = parts.shelf.bundle(plan), folder
        self._models = parts.models(self._bundle)
        bases = parts.base(self._bundle)
        self._base = None if bases is None else _written(bases, bases.initial(), folder)

    def initial(self) -> RoundModel:
        return self.model(self._models.initial())

    def model(self, digest: Digest) -> RoundModel:
        return _written(self._models, digest, self._folder)

    def trainer(self, silo: str, data: Path) -> SiloTrainer:
        return SiloTrainer(self._bundle, load_silo_data(data), silo, DeviceSettings(), base=self._base)


def score_silos(coordinator: Path, plan: Digest, final: Digest, data: Mapping[str, Path]) -> tuple[Scores, Scores]:
    """A Scoring, whose execution accuracy is of each silo's own database."""
    with TemporaryDirectory() as name:
        models = PlanModels(coordinator, plan, Path(name))
        before, after = _scored(models, (models.initial(), models.model(final)), data)
    return before, after


def score_simulated(simulated: Simulated, data: Mapping[str, Path]) -> Scores:
    """Of the best model of a simulation."""
    with TemporaryDirectory() as name:
        models = PlanModels(simulated.coordinator, simulated.plan, Path(name))
        (best,) = _scored(models, (models.model(simulated.best),), data)
    return best


def _scored(models: PlanModels, each: Sequence[RoundModel], data: Mapping[str, Path]) -> list[Scores]:
    scores: list[Scores] = [{} for _ in each]
    for silo, of_silo in data.items():
        trainer = models.trainer(silo, of_silo)
        with judged_on(SqliteTarget(of_silo / "db.sqlite"), Limits()) as same_result:
            for model, by_silo in zip(each, scores, strict=True):
                evaluation = trainer.evaluate(
                    model_path=model.file, model=model.manifest, split="test", same_result=same_result
                )
                by_silo[silo] = Score.of(evaluation)
    return scores


def _written(models: ModelStore, digest: Digest, folder: Path) -> RoundModel:
    """The model as an agent has it: a file of its flat vector."""
    manifest = models.manifest(digest)
    path = folder / digest
    with path.open("wb") as file:
        for chunk in range(manifest.chunks):
            file.write(models.read_chunk(digest, chunk))
    return RoundModel(file=path, manifest=manifest)
