"""Receipts for updates: an update is in the audit log before it counts, and a silo holds the coordinator's word for it.

The log has the head of the silo's own log that came with the update; the receipt countersigns that head, and says how
far the coordinator's log is by then.
"""

from dataclasses import replace

from lorica_coordinator.service.ports import AuditPort, Keys
from lorica_coordinator.service.threads import Threads
from lorica_security.audit.entry import Event
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.codecs.update_receipt import RECEIPT_DOMAIN, UpdateReceipt, silo_uri
from silo_wire.messages import MaskedHeader, UpdateHeader


class Receipts:
    """Raises StorageError where the log cannot be written: then the update does not count."""

    def __init__(self, *, audit: AuditPort, keys: Keys, threads: Threads) -> None:
        self._audit, self._keys, self._threads = audit, keys, threads

    async def enter(self, silo: SiloName, header: UpdateHeader | MaskedHeader) -> None:
        """Into the log, before the update counts: it is whole and checked."""
        key, log = header.key, shown_log(header)
        await self._threads.store(
            self._audit.append,
            Event.UPDATE_RECEIVED,
            who=silo_uri(FederationName(key.federation), silo),
            plan=key.plan,
            round=key.round,
            attempt=key.attempt,
            silo=silo,
            update=header.manifest.digest,
            bytes=header.manifest.total_bytes,
            masked="yes" if isinstance(header, MaskedHeader) else "no",
            **log.particulars(),
        )

    async def receipt(self, silo: SiloName, header: UpdateHeader | MaskedHeader) -> UpdateReceipt:
        """For an update that counts; may be given again."""
        unsigned = UpdateReceipt(
            key=header.key,
            silo=silo,
            update=header.manifest.digest,
            total_bytes=header.manifest.total_bytes,
            shown=shown_log(header).head,
            head=await self._threads.store(self._audit.signed_head),
            signature=b"",
        )
        return replace(unsigned, signature=self._keys.sign(RECEIPT_DOMAIN, unsigned.statement))


def shown_log(header: UpdateHeader | MaskedHeader) -> SignedHead:
    """Raises MalformedMessage for an update that comes without: its silo's log could be written anew later."""
    if header.log is None:
        raise MalformedMessage("an update comes with the head of its silo's audit log: update the agent")
    return header.log
