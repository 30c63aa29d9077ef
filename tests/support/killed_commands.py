"""A command that is killed at each of its durable steps in turn, in the test's own process.

A step changes a name on the disk, or commits a transaction. The command dies just before one of them. From then on none
of its steps reaches the disk, not even those of its `finally` blocks: what is left is what kill -9 leaves. Bytes that a
page cache would lose with the power are not: that is for files.replace and its fsync, and not for these tests.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from sqlalchemy import Connection, Engine, event

_CALLS = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "link")
MOST_STEPS = 400


class Killed(BaseException):
    """The command ends here."""


class Steps:
    """What a command did so far below `within`; it dies before step `at`, never for None. What others do elsewhere is
    not counted."""

    def __init__(self, within: Path, at: int | None = None) -> None:
        self._within, self._at = within, at
        self.taken: list[str] = []
        self.died = ""

    def meet(self, step: str, at: object) -> None:
        """`at` is the path; one that is relative, to an open folder, counts."""
        path = Path(str(at))
        if path.is_absolute() and not path.is_relative_to(self._within):
            return
        if self.died or len(self.taken) == self._at:
            self.died = self.died or f"{len(self.taken)}: {step}"
            raise Killed(step)
        self.taken.append(step)


@contextmanager
def dying(at: int | None, *, within: Path) -> Iterator[Steps]:
    """In the block, whatever writes below `within` dies before durable step `at`, counted from 0."""
    steps = Steps(within, at)
    with ExitStack() as patched:
        for name in _CALLS:
            patched.enter_context(patch.object(os, name, _counted(getattr(os, name), name, steps)))
        patched.enter_context(patch.object(os, "open", _opening(os.open, steps)))
        patched.enter_context(patch.object(sqlite3, "connect", _connecting(sqlite3.connect, steps, within)))

        def committing(connection: Connection) -> None:
            steps.meet("commit", connection.engine.url.database)

        event.listen(Engine, "commit", committing)
        patched.callback(event.remove, Engine, "commit", committing)
        yield steps


def each_death(
    command: Callable[[], object], *, before: Callable[[], None], within: Path, first: int = 0, every: int = 1
) -> Iterator[str]:
    """For each durable step of `command` below `within`: `before()`, then the command up to there; the step, for the
    test to look.

    `every` takes every so many of them, from `first` on. Ends after the run in which the command came to its end, which
    is given as "".
    """
    for at in count(first, every):
        assert at < MOST_STEPS, "the command never comes to its end"
        before()
        with dying(at, within=within) as steps:
            try:
                command()
            except BaseException:
                if not steps.died:  # else it died in one of its threads or tasks, and the others saw no more than that
                    raise
        yield steps.died
        if not steps.died:
            return


def _counted(real: Callable[..., Any], name: str, steps: Steps) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        if name != "mkdir" or not os.path.isdir(arguments[0]):
            steps.meet(f"{name} {' '.join(str(one)[-60:] for one in arguments)}", arguments[0])
        return real(*arguments, **named)

    return call


def _opening(real: Callable[..., int], steps: Steps) -> Callable[..., int]:
    def call(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_CREAT and not os.path.lexists(path):
            steps.meet(f"create {str(path)[-60:]}", path)
        return real(path, flags, *arguments, **named)

    return call


def _connecting(real: Callable[..., Any], steps: Steps, within: Path) -> Callable[..., Any]:
    """A copy of a database is made by one statement of SQLite's own, and the silo's journal is committed by one."""

    class Mortal(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> Any:
            if sql.startswith(("VACUUM", "COMMIT")):
                steps.meet(sql, within)
            return super().execute(sql, *arguments)

    def connect(*arguments: Any, **named: Any) -> Any:
        return real(*arguments, **{"factory": Mortal, **named})

    return connect
