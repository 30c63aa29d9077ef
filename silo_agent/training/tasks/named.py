"""The tasks that there are, in the order of a plan's `[task] kind`."""

from collections.abc import Set
from typing import Final

from silo_agent.training.tasks.task import Task
from silo_agent.training.tasks.text_to_sql import TEXT_TO_SQL
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT, TextToText
from silo_agent.training.tasks.wikisql import WIKISQL
from silo_wire.plans.sections.task import TaskSection

TASKS: Final[tuple[Task, ...]] = (TEXT_TO_SQL, WIKISQL, TEXT_TO_TEXT)

_BY_NAME: Final = {task.name: task for task in TASKS}


def task_named(name: str) -> Task:
    """As it reads data; raises KeyError for a name that no plan may have."""
    return _BY_NAME[name]


def task_of(section: TaskSection) -> Task:
    """A plan's, with its score."""
    return TextToText(section.score) if section.kind == TEXT_TO_TEXT.name else _BY_NAME[section.kind]


def task_marked_by(keys: Set[str]) -> Task:
    """Whose a line with these keys is; text-to-SQL, whose errors say what is missing, where no task knows them."""
    return next((task for task in TASKS if task.marked_by(keys)), TEXT_TO_SQL)
