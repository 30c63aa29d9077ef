"""A privacy ledger on disk: JSON lines in a private folder, appended to and never rewritten (ledger.py)."""

from collections.abc import Sequence
from pathlib import Path

from lorica_security.host.files import append_private, is_there, make_private_folder, read_private
from lorica_security.privacy.ledger import Entry, read_ledger

_REMEDY = "free some space; nothing is released until the ledger can be written"


class PrivacyLedgerFile:
    """`append` is for one process at a time, whose ledger it is; anyone may read.
    Raises StorageError, IntegrityError naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> tuple[Entry, ...]:
        return self._read()[0]

    def append(self, entries: Sequence[Entry]) -> None:
        """Durable when this returns. After an error none, some or all of
        `entries` are there: each was meant to be released.
        """
        make_private_folder(self.path.parent)
        _, whole = self._read()
        data = b"".join(entry.line() for entry in entries)
        append_private(self.path, data, whole, remedy=_REMEDY)  # an entry that a crash left unfinished goes

    def _read(self) -> tuple[tuple[Entry, ...], int]:
        if not is_there(self.path):
            return (), 0
        return read_ledger(read_private(self.path), str(self.path))
