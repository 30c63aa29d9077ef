"""What the coordinator's audit log proves of the silos' logs: the heads that they sent stand in it."""

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.audit.entry import Event
from lorica_security.audit.signed_head import SignedHead, check_one_history
from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.on_disk.reading import Reading, heads_in


def silo_heads(reading: Reading) -> dict[str, list[SignedHead]]:
    """By writer, in the order in which they came. Raises IntegrityError naming an entry with a head that its silo did
    not sign.

    Of a silo that was enrolled before the log began nothing is known but what it says: its heads are given as they are.
    """
    keys: dict[str, list[Ed25519PublicKey]] = {}
    heads: dict[str, list[SignedHead]] = {}
    federation = reading.writer.removesuffix("/coordinator")
    for entry in reading.of(Event.ENROLLED, Event.IDENTITY_SUCCEEDED):
        try:
            key = public_key_from_bytes(bytes.fromhex(entry.text("identity_key")))
        except (ValueError, MalformedMessage) as error:
            raise IntegrityError(f"entry {entry.sequence} gives a silo a key that does not parse ({error})") from error
        keys.setdefault(f"{federation}/silo/{entry.text('silo')}", []).append(key)
    for entry, head in heads_in(reading.of(Event.UPDATE_RECEIVED)):
        if head.writer in keys:
            try:
                head.check(*keys[head.writer])
            except IntegrityError as error:
                raise IntegrityError(f"entry {entry.sequence} holds what no silo signed ({error})") from error
        heads.setdefault(head.writer, []).append(head)
    return heads


def check_silos(reading: Reading) -> list[str]:
    """What `verify` prints of them. Raises IntegrityError for a silo whose log went back, or forked: it proves that
    itself."""
    said = []
    for writer, heads in sorted(silo_heads(reading).items()):
        check_one_history(heads, reading.where)
        said.append(f"{writer}: {len(heads)} heads of its log, one history, up to entry {heads[-1].head.sequence}")
    return said
