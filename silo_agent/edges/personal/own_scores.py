"""The scores of this silo's own models beside the global model's, as `personal/scores.json` of its folder has them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from lorica_security.console.strict_toml import Section
from silo_agent.edges.disk.private_record import PrivateRecord
from silo_agent.settings import PersonalSection
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.messages import Evaluation
from silo_wire.plans.sections.model import DigestText
from silo_wire.plans.sections.task import ScoreName, label_of

Which = Literal["local", "global", "personal"]
MODELS: Final[tuple[Which, ...]] = ("local", "global", "personal")


class Scored(Section):
    """A model, and how it answered this silo's held-out questions. `goal` stands for what it was trained for, by
    `method`; the global model has neither."""

    model: DigestText
    method: str = ""
    goal: DigestText | None = None
    examples: Annotated[int, Field(ge=1)]
    exact_matches: Annotated[int, Field(ge=0)]
    executed: Annotated[int, Field(ge=0)]
    execution_matches: Annotated[int, Field(ge=0)]
    loss_per_token: Annotated[float, Field(ge=0)]
    right: dict[ScoreName, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)  # in parts

    @classmethod
    def of(
        cls, model: Digest, evaluation: Evaluation, right: Mapping[str, float], *, method: str, goal: str | None
    ) -> "Scored":
        """`right`: answers by each metric of the task, the plan's score first."""
        return cls(
            model=model,
            method=method,
            goal=goal,
            examples=evaluation.examples,
            exact_matches=evaluation.exact_matches,
            executed=evaluation.executed,
            execution_matches=evaluation.execution_matches,
            loss_per_token=evaluation.loss_per_token,
            right=dict(right) if len(right) > 1 else {},
        )

    @property
    def rank(self) -> tuple[float, float, float]:
        """The larger, the better: right results, then right texts, then the loss."""
        results = self.execution_matches / self.executed if self.executed else 0.0
        return results, self.exact_matches / self.examples, -self.loss_per_token

    @property
    def numbers(self) -> Mapping[str, float]:
        """Each score under its name in metrics and JSON; execution where something was executed, parts of answers where
        the task knows any."""
        executed = {"execution_match": self.execution_matches / self.executed} if self.executed else {}
        parts = {name: count / self.examples for name, count in self.right.items()}
        whole = {"loss_per_token": self.loss_per_token, "exact_match": self.exact_matches / self.examples}
        return {**whole, **executed, **parts}


class OwnScores(Section):
    """The scores of one plan's models. All are of the same questions: `questions` stands for them, and for whether SQL
    was executed. `score` is the plan's."""

    version: Literal[1] = 1
    plan: DigestText | None = None
    score: ScoreName = "exact_match"
    questions: str = ""
    complete: DigestText | None = None  # for which global model and settings all was done
    no_local: str = ""  # why there is no local model
    scores: dict[Which, Scored] = Field(default_factory=dict)

    @property
    def score_label(self) -> str:
        """The plan's score, as people are shown it: exact_matches of each model are answers by that one."""
        return label_of(self.score)

    @property
    def numbers(self) -> Mapping[str, Mapping[str, float]]:
        return {which: scored.numbers for which, scored in self.scores.items()}

    @property
    def best(self) -> Which:
        """Of models that are as good as each other the one that knows least of this silo's records."""
        known = [which for which in ("global", "personal", "local") if which in self.scores]
        return max(known, key=lambda which: self.scores[which].rank, default="global")


def completion(model: Digest, settings: PersonalSection) -> Digest:
    """Stands for all that is to be done for a global model."""
    return digest_of(canonical_json([model, settings.model_dump(mode="json")]))


def own_scores(folder: Path) -> PrivateRecord[OwnScores]:
    """What `folder`, a silo's `personal`, says; scores of no plan where nothing was scored."""
    return PrivateRecord(
        folder / "scores.json",
        OwnScores,
        check=lambda content: None,
        remedy="delete the folder, and `silo-agent personal train` makes it anew",
    )
