"""Where an audit log's lines are kept: in files of a folder (log_file.py), or wherever else a program has room.

What an entry says, when a seal is due and what follows what is the writer's to decide (`AuditLog`), and a reader's to
check (audit/verification.py). A place keeps lines in their order, lets one writer add at a time, and reads them back.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from lorica_security.audit.entry import Entry
from lorica_security.audit.verification import Position

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Line:
    """A whole line of a log, with its newline, and where it stands."""

    content: bytes
    where: str


class LogEnd(Protocol):
    """The end of a log, which nobody else adds to meanwhile."""

    @property
    def position(self) -> Position:
        """As the newest lines have it, which were checked."""

    def is_full_with(self, size: int) -> bool:
        """Whether a seal is due when `size` more bytes are added, since what follows goes to another part."""

    def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Durable when this returns, all or none; `position` is behind the last of them."""


class LogPlace(Protocol):
    """Of one log; safe to use from several threads and processes. Raises StorageError, IntegrityError naming what it
    keeps lines in."""

    @property
    def where(self) -> str:
        """For people."""

    def lines(self) -> Iterator[Line]:
        """Every whole line, oldest first; IntegrityError where one is seen to be missing."""

    def telling(self, *texts: str) -> Iterator[Line]:
        """The whole lines that have one of `texts` somewhere, newest first."""

    def alone(self) -> AbstractContextManager[LogEnd]:
        """Raises IntegrityError for an end that is not as a writer left it: it is not added to."""

    def in_tries(self, work: Callable[[], R]) -> R:
        """What `work` returns, which holds the end once; again where others were in its way."""
