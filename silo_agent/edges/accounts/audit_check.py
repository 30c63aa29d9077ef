"""What a silo's audit log proves by itself, and what it proves of the coordinator's: its receipts stand in it."""

from collections.abc import Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.audit.entry import Entry, Event
from lorica_security.audit.signed_head import check_one_history
from lorica_security.audit.verification import Known
from lorica_security.errors import IntegrityError, LoricaError
from lorica_security.identifiers import Identity, SiloName
from lorica_security.on_disk.reading import Reading
from silo_wire.codecs.update_receipt import UpdateReceipt


def receipts_in(reading: Reading, coordinator: Ed25519PublicKey | None) -> Iterator[tuple[Entry, UpdateReceipt]]:
    """Raises IntegrityError naming an entry whose receipt `coordinator` did not sign for this silo; None: unchecked."""
    who = Identity.from_uri(reading.writer)
    for entry in reading.of(Event.RECEIPT):
        try:
            receipt = UpdateReceipt.from_particulars(entry.details, federation=who.federation, silo=SiloName(who.name))
            if coordinator is not None:
                receipt.check(coordinator)
        except LoricaError as error:
            raise IntegrityError(
                f"{reading.where}: entry {entry.sequence} is no receipt of the coordinator ({error})"
            ) from error
        yield entry, receipt


def check_receipts(reading: Reading, coordinator: Ed25519PublicKey) -> list[str]:
    """What `verify` prints of them.

    Raises IntegrityError where the coordinator countersigned another history of this log than is here, or signed two of
    its own.
    """
    found = list(receipts_in(reading, coordinator))
    shown = [
        Known(head=receipt.shown, by=f"the coordinator's receipt in entry {entry.sequence}") for entry, receipt in found
    ]
    reading.walk.check_known(shown, reading.where)
    check_one_history((receipt.head for _, receipt in found), reading.where)
    acknowledged = {receipt.update for _, receipt in found}
    left = {entry.text("update") for entry in reading.of(Event.UPDATE_LEAVES, Event.MASKED_UPDATE_LEAVES)}
    said = [f"{len(left)} updates left this silo, the coordinator signed for {len(left & acknowledged)} of them"]
    if acknowledged - left:
        raise IntegrityError(
            f"{reading.where}: the coordinator signed for update {sorted(acknowledged - left)[0]}, and no entry "
            "says that it left"
        )
    if found:
        newest = found[-1][1]
        said.append(f"countersigned by the coordinator: this log up to entry {newest.shown.sequence}")
        said.append(
            f"the coordinator's own log, by these receipts: one history, up to entry {newest.head.head.sequence}"
        )
    return said
