"""The silo's privacy ledger as its folder holds it, the coordinator's newest receipt beside it, and the guard before
both."""

import time
from pathlib import Path

from lorica_security.errors import IntegrityError
from lorica_security.host.files import is_there, make_private_folder, read_private, write_private
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.privacy import PrivacyGuard, SharingPort
from silo_wire.codecs.ledger_receipt import LedgerReceipt


def guard_of(
    folder: SiloFolder,
    credentials: SiloCredentials,
    policy: SiloPolicy,
    journal: RoundJournal,
    *,
    sharing: SharingPort | None = None,
) -> PrivacyGuard:
    """Of the silo in `folder`, with the budget of its policy, which it has for itself unless `sharing` says
    otherwise."""
    return PrivacyGuard(
        ledger=PrivacyLedgerFile(folder.privacy_ledger),
        heads=journal,
        receipts=LedgerReceiptFile(folder.privacy_receipt, credentials),
        budget=policy.budget,
        clock=time.time,
        where=str(folder.privacy_ledger),
        sharing=sharing,
    )


class LedgerReceiptFile:
    """The newest receipt. Raises StorageError, IntegrityError naming the file."""

    def __init__(self, path: Path, credentials: SiloCredentials) -> None:
        self._path, self._credentials = path, credentials

    def newest(self) -> LedgerReceipt | None:
        if not is_there(self._path):
            return None
        receipt = LedgerReceipt.from_json(read_private(self._path), str(self._path))
        who = self._credentials
        try:
            receipt.check(who.coordinator_key, federation=who.federation, silo=who.silo)
        except IntegrityError as error:
            raise IntegrityError(
                f"{self._path} is not signed by this federation's coordinator for silo {who.silo}: it was edited, "
                "or is another silo's; put the right one back"
            ) from error
        return receipt

    def keep(self, receipt: LedgerReceipt) -> None:
        if receipt == self.newest():
            return
        make_private_folder(self._path.parent)
        write_private(self._path, receipt.to_json())
