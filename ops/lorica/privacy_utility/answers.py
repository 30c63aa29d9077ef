"""The study's scores: which held-out questions a model answers with the very SQL, question by question.

No database is asked: the study does not compare results of queries.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from lorica.demo.scoring import PlanModels, Score, Scores
from silo_agent.service.ports import RoundModel
from silo_agent.training.data.serialisation import exact_match
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.canonical import Digest


@dataclass(frozen=True, slots=True)
class Answers:
    """A Scoring (ops/lorica/demo/scoring.py).

    `right` has of each silo one character a question of its test.jsonl, in order: 1 where the final model's answer is
    exact, else 0.
    """

    right: dict[str, str] = field(default_factory=dict)

    def __call__(
        self, coordinator: Path, plan: Digest, final: Digest, data: Mapping[str, Path]
    ) -> tuple[Scores, Scores]:
        before: Scores = {}
        after: Scores = {}
        with TemporaryDirectory() as name:
            models = PlanModels(coordinator, plan, Path(name))
            for silo, of_silo in data.items():
                trainer = models.trainer(silo, of_silo)
                before[silo], _ = _answered(trainer, models.initial())
                after[silo], right = _answered(trainer, models.model(final))
                lines = (of_silo / "test.jsonl").read_text().splitlines()
                self.right[silo] = "".join("01"[right[json.loads(line)["query"]]] for line in lines)
        return before, after


def _answered(trainer: SiloTrainer, model: RoundModel) -> tuple[Score, Mapping[str, bool]]:
    """The score, and by a question's gold SQL, of which each question has its own, whether its answer is exact."""
    right: dict[str, bool] = {}

    def note(gold: str, predicted: str) -> None:
        right[gold] = exact_match(predicted, gold)

    evaluation = trainer.evaluate(model_path=model.file, model=model.manifest, split="test", same_result=note)
    return Score.of(evaluation), right
