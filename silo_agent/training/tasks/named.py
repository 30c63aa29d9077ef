"""The tasks that there are: those that Lorica brings, and those that the silo's people installed."""

from collections.abc import Collection, Iterator, Set
from typing import Final

from silo_agent.training.tasks.installed import installed_task, require_as_planned
from silo_agent.training.tasks.task import Task
from silo_agent.training.tasks.text_task import TextTask
from silo_agent.training.tasks.text_to_sql import TEXT_TO_SQL
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT
from silo_agent.training.tasks.wikisql import WIKISQL
from silo_wire.plans.sections.task import TaskSection

TASKS: Final[tuple[Task, ...]] = (TEXT_TO_SQL, WIKISQL, TEXT_TO_TEXT)
"""That Lorica brings, in the order of silo_wire's BUILT_IN."""

_BY_NAME: Final = {task.name: task for task in TASKS}


def task_named(name: str) -> Task:
    """As it reads data; raises DataError where none of this name is there."""
    return _BY_NAME[name] if name in _BY_NAME else installed_task(name).task()


def task_of(section: TaskSection) -> Task:
    """A plan's, with its score. Raises PolicyRefusal where other code is installed than the plan names, DataError where
    none is, or where it has no such score."""
    task = _BY_NAME[section.kind] if section.built_in else require_as_planned(section).task()
    return task.by(section.score) if isinstance(task, TextTask) else task


def section_of(task: Task) -> TaskSection:
    """A plan's for this task, as it is installed here."""
    if task in TASKS:
        return TaskSection(kind=task.name)
    found = installed_task(task.name)
    return TaskSection(kind=found.name, version=found.version, digest=found.digest, score=task.metrics[0])


def task_marked_by(keys: Set[str], allowed: Collection[str] = ()) -> Task:
    """Whose a line with these keys is; text-to-SQL, whose errors say what is missing, where no task knows them.
    `allowed` are names of installed tasks, which are asked first."""
    return next((task for task in _asked(allowed) if task.marked_by(keys)), TEXT_TO_SQL)


def _asked(allowed: Collection[str]) -> Iterator[Task]:
    yield from map(task_named, allowed)
    yield from TASKS
