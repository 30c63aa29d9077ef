"""`[task]`: what the model is trained for."""

from typing import Literal

from lorica_security.console.strict_toml import Section

TaskName = Literal["sql", "wikisql"]


class TaskSection(Section):
    """What a silo's lines are, and what the model is to answer; silo_agent/training/tasks has a file for each."""

    kind: TaskName = "sql"
