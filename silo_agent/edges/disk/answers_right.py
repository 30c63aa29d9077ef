"""How many held-out questions the global model that was scored last answers right, as a whole and in part.

The whole is what leaves as exact matches; the parts are this silo's own, for its people: `status`, its terminal, and
its metrics on loopback. Nothing reads the file to send it.
"""

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from lorica_security.console.strict_toml import Section
from lorica_security.errors import DataError
from silo_agent.edges.disk.private_record import PrivateRecord
from silo_wire.plans.sections.model import DigestText
from silo_wire.plans.sections.task import ScoreName

NOTE: Final = "answers-right"
"""The event that a log and a terminal have of it."""


class AnswersRight(Section):
    """`right`: of `questions` answers, how many each metric of the plan's task holds right; empty where the task knows
    no parts, or nothing was scored."""

    version: Literal[1] = 1
    plan: DigestText | None = None
    model: DigestText | None = None
    questions: Annotated[int, Field(ge=0)] = 0
    right: dict[ScoreName, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """0 to 1, by metric."""
        return {name: count / self.questions for name, count in self.right.items()}

    def of_plan(self, plan: str | None) -> "AnswersRight":
        """This where it is of `plan`, else nothing."""
        return self if plan is not None and self.plan == plan else AnswersRight()

    @property
    def line(self) -> str:
        """`of 120 answers: overall 71, ...`; "" where there are none."""
        told = ", ".join(f"{name.replace('_', ' ')} {round(count, 1):g}" for name, count in self.right.items())
        return f"right of {self.questions} answers: {told}" if self.right else ""


def answers_right(path: Path) -> PrivateRecord[AnswersRight]:
    """What the file at `path` says; nothing where there is none."""
    return PrivateRecord(
        path, AnswersRight, check=_check, remedy="delete it: the next evaluation of a global model makes it anew"
    )


def _check(content: AnswersRight) -> None:
    if any(count > content.questions for count in content.right.values()):
        raise DataError(f"more answers are right than the {content.questions} that there are")
