"""Held-out scores of the first and the final model, by the agents' own evaluation on each silo's test split."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from coordinator.composition import Coordinator
from coordinator.edges.coordinator_folder import CoordinatorFolder
from silo_agent.sql_sandbox import Sandbox, SqliteTarget
from silo_agent.training.device import DeviceSettings
from silo_agent.training.evaluation import in_sandbox
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.text_to_sql_data import load_silo_data
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation


@dataclass(frozen=True, slots=True)
class Score:
    """Fractions, 0 to 1."""

    questions: int
    exact_match: float
    execution_accuracy: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Score":
        return cls(
            evaluation.examples,
            evaluation.exact_matches / evaluation.examples,
            evaluation.execution_matches / max(1, evaluation.executed),
        )


def score_silos(
    coordinator: Path, plan: Digest, final: Digest, data: Mapping[str, Path]
) -> tuple[dict[str, Score], dict[str, Score]]:
    """Each silo's scores with the plan's initial model, and with `final`."""
    parts = Coordinator.load(CoordinatorFolder(coordinator))
    bundle = parts.shelf.bundle(plan)
    models = parts.models(bundle)
    scores: tuple[dict[str, Score], dict[str, Score]] = ({}, {})
    with TemporaryDirectory() as folder:
        files = []
        for index, digest in enumerate((models.initial(), final)):
            manifest = models.manifest(digest)
            path = Path(folder) / f"model-{index}"
            with path.open("wb") as file:
                for chunk in range(manifest.chunks):
                    file.write(models.read_chunk(digest, chunk))
            files.append((path, manifest))
        for name, silo in data.items():
            trainer = SiloTrainer(bundle, load_silo_data(silo), name, DeviceSettings())
            with Sandbox(SqliteTarget(silo / "db.sqlite")) as box:
                for (path, manifest), by_silo in zip(files, scores, strict=True):
                    evaluation = trainer.evaluate(
                        model_path=path, model=manifest, split="test", same_result=in_sandbox(box)
                    )
                    by_silo[name] = Score.of(evaluation)
    return scores
