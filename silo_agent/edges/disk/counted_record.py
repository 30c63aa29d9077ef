"""A sealed record that counts its changes, so that what is noted of the count elsewhere shows that it was lost or put
back."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from lorica_security.console.strict_toml import Section
from lorica_security.errors import ConfigurationError
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.attempt import MAX_NUMBER
from silo_agent.edges.disk.private_record import PrivateRecord, alone

Number = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]
MOST_UNPROVEN = 1 << 31
"""A file whose seal is bad and that says a larger number is as good as none: what follows must still be a `Number`."""


class CountedContent(Section):
    changes: Number = 0  # of this file


Content = TypeVar("Content", bound=CountedContent)


@dataclass(frozen=True, slots=True)
class Notes(Generic[Content]):
    """What is noted elsewhere of a record. `check` raises PolicyRefusal unless a file of so many changes is the newest
    that there was.

    `note` is durable when it returns, and raises PolicyRefusal where this silo's memory of masked rounds is not whole.
    """

    check: Callable[[int], None]
    note: Callable[[Content], None]


class CountedRecord(PrivateRecord[Content]):
    """A change is written here, then noted, so that a kill leaves the note one behind."""

    def __init__(
        self,
        path: Path,
        kind: type[Content],
        *,
        check: Callable[[Content], None],
        remedy: str,
        seal: Seal,
        notes: Notes[Content] | None = None,
    ) -> None:
        super().__init__(path, kind, check=check, remedy=remedy, seal=seal)
        self._notes = notes

    def read(self, *, whoever_wrote_it: bool = False) -> Content:
        if self._notes is None or whoever_wrote_it:
            return super().read(whoever_wrote_it=whoever_wrote_it)
        with alone(self._path.parent):  # or it would be compared with the note of a change that comes in between
            content = super().read()
            self._notes.check(content.changes)
        return content

    def change(self, edit: Callable[[Content], Content], *, whoever_wrote_it: bool = False, make: bool = True) -> None:
        def counted(content: Content) -> Content:
            after = edit(content)
            return content if after == content else after.model_copy(update={"changes": content.changes + 1})

        with alone(self._path.parent):
            if self._notes is None:
                super().change(counted, whoever_wrote_it=whoever_wrote_it, make=make)
                return
            self._notes.note(self.read())  # where a kill left the note behind
            super().change(counted, make=make)
            self._notes.note(self.read())


def require_plausible(number: int, what: str) -> None:
    """Raises ConfigurationError for a number of a file that anybody may have written, and that is too large to go on
    from."""
    if number > MOST_UNPROVEN:
        raise ConfigurationError(f"{what} is {number}, beyond {MOST_UNPROVEN}")
