"""The silo's privacy ledger on disk: JSON lines in a private folder, appended to and never rewritten (security/privacy/ledger.py).

Beside it lies the coordinator's newest receipt, one file that is replaced as a whole.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from security.errors import IntegrityError, StorageError
from security.files import make_private_folder, read_private, sync_folder, write_at, write_private
from security.privacy.ledger import Entry, read_ledger
from silo_agent.edges.key_store import SiloCredentials
from silo_agent.edges.round_journal import RoundJournal
from silo_agent.edges.silo_folder import SiloFolder
from silo_agent.policy import SiloPolicy
from silo_agent.service.privacy import PrivacyGuard
from silo_wire.ledger_receipt import LedgerReceipt

_REMEDY = "free some space; nothing is released until the ledger can be written"


def guard_of(
    folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy, journal: RoundJournal
) -> PrivacyGuard:
    """Of the silo in `folder`, with the budget of its policy."""
    return PrivacyGuard(
        ledger=PrivacyLedgerFile(folder.privacy_ledger),
        heads=journal,
        receipts=LedgerReceiptFile(folder.privacy_receipt, credentials),
        budget=policy.budget,
        clock=time.time,
        where=str(folder.privacy_ledger),
    )


class PrivacyLedgerFile:
    """`append` is for one process at a time, the agent; anyone may read. Raises StorageError, IntegrityError naming the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> tuple[Entry, ...]:
        return self._read()[0]

    def append(self, entries: Sequence[Entry]) -> None:
        """Durable when this returns. After an error none, some or all of `entries` are there: each was meant to be released."""
        make_private_folder(self.path.parent)
        _, whole = self._read()
        fresh = not self.path.exists()
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, whole)  # an entry that a crash left unfinished
                write_at(descriptor, b"".join(entry.line() for entry in entries), whole)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if fresh:
                sync_folder(self.path.parent)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written ({error.strerror or error}): {_REMEDY}") from error

    def _read(self) -> tuple[tuple[Entry, ...], int]:
        if not self.path.exists():
            return (), 0
        return read_ledger(read_private(self.path), str(self.path))


class LedgerReceiptFile:
    """The newest receipt. Raises StorageError, IntegrityError naming the file."""

    def __init__(self, path: Path, credentials: SiloCredentials) -> None:
        self._path, self._credentials = path, credentials

    def newest(self) -> LedgerReceipt | None:
        if not self._path.exists():
            return None
        receipt = LedgerReceipt.from_json(read_private(self._path), str(self._path))
        who = self._credentials
        try:
            receipt.check(who.coordinator_key, federation=who.federation, silo=who.silo)
        except IntegrityError as error:
            raise IntegrityError(
                f"{self._path} is not signed by this federation's coordinator for silo {who.silo}: it was edited, or is another "
                "silo's; put the right one back"
            ) from error
        return receipt

    def keep(self, receipt: LedgerReceipt) -> None:
        if receipt == self.newest():
            return
        make_private_folder(self._path.parent)
        write_private(self._path, receipt.to_json())
