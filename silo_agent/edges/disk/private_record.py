"""A small file that commands and the running agent both keep: private, strict JSON, one writer at a time.

It is read anew whenever it is asked for, so that what people change holds at once. One that does not parse is refused,
never taken for empty, and neither is a link that leads nowhere.
"""

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import BaseModel, ValidationError

from lorica_security.console.strict_toml import describe
from lorica_security.errors import ConfigurationError, LoricaError, StorageError
from lorica_security.host.files import is_there, read_private, write_private
from lorica_security.identity.seal import Seal, unsealed

RESET = "silo-agent trust reset-memory"
"""By which people go on with what is left of the records of masked rounds."""
AS_HELD = "--release-groups-as-they-are"
"""The option of it by which people say that no release groups were lost."""
Content = TypeVar("Content", bound=BaseModel)
_held = threading.local()
"""`folders`: those that this thread has for itself, by device and inode."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process or thread changes the records in `folder` within the block, in which they may be changed. Raises
    StorageError."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StorageError(f"{folder} cannot be opened: {error.strerror}") from error
    held: set[tuple[int, int]] = _held.__dict__.setdefault("folders", set())
    status = os.fstat(descriptor)
    this = status.st_dev, status.st_ino
    mine = this not in held
    try:
        if mine:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            held.add(this)
        yield
    finally:
        if mine:
            held.discard(this)
        os.close(descriptor)


class PrivateRecord(Generic[Content]):
    """`check` raises a LoricaError for content that must not be believed; `remedy` is told with anything wrong.

    With a `seal` the file is one that this silo alone can have written.
    """

    def __init__(
        self,
        path: Path,
        kind: type[Content],
        *,
        check: Callable[[Content], None],
        remedy: str,
        seal: Seal | None = None,
    ) -> None:
        self._path = path
        self._kind = kind
        self._check = check
        self._remedy = remedy
        self._seal = seal

    def read(self, *, whoever_wrote_it: bool = False) -> Content:
        """What the file says, and a new one of its kind where there is no file.

        `whoever_wrote_it`, people take over what is there: its seal does not matter, and what does not parse is as good
        as no file. Raises ConfigurationError naming the file when it is damaged, edited, or when others can read it,
        StorageError.
        """
        if not is_there(self._path):
            return self._kind()
        raw = read_private(self._path)
        try:
            if self._seal is not None:
                raw = unsealed(raw) if whoever_wrote_it else self._seal.opened(self._path.name, raw)
            content = self._kind.model_validate_json(raw)
            self._check(content)
        except (ValidationError, LoricaError) as error:
            if whoever_wrote_it:
                return self._kind()
            why = describe(error) if isinstance(error, ValidationError) else error
            raise ConfigurationError(f"{self._path} is damaged ({why}): {self._remedy}") from error
        return content

    def change(self, edit: Callable[[Content], Content], *, whoever_wrote_it: bool = False, make: bool = True) -> None:
        """Replace what is there by what `edit` makes of it, durably; nothing is written when that is the same, or
        raises.

        Where there is no file, one that says nothing is made, unless `make` is false.
        """
        with alone(self._path.parent):
            before = self.read(whoever_wrote_it=whoever_wrote_it)
            after = edit(before)
            if after != before or whoever_wrote_it or (make and not is_there(self._path)):
                raw = after.model_dump_json(indent=1).encode() + b"\n"
                write_private(self._path, raw if self._seal is None else self._seal.sealed(self._path.name, raw))
