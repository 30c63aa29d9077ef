"""What a newer audit log says of the time since a backup, put into the records that came from it.

The log is the coordinator's own: it is checked against its identity key, and has to go on from the log in the backup.
What shuts somebody out is taken from all of it; what lets somebody in only from entries that a seal covers, since
nobody has signed those behind the last one. The entry `restore` says which these were, since a seal that follows it
covers them as well: they stay what they were.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy import Connection, and_, delete, insert, update
from sqlalchemy.exc import SQLAlchemyError

from lorica_coordinator.edges.database.certificate_records import has_good_certificate
from lorica_coordinator.edges.database.round_tables import certificates, held_trust, silos
from lorica_coordinator.edges.database.sqlite_database import database_engine
from lorica_coordinator.edges.keys.key_store import OPERATOR_NAME
from lorica_security.audit.entry import Entry, Event
from lorica_security.audit.verification import Known
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.identifiers import FederationName, Identity, Role, SiloName, silo_name
from lorica_security.on_disk.log_place import LogPlace
from lorica_security.on_disk.reading import Reading, read_log
from silo_wire.canonical import Digest

PUT_BACK: Final = ("restore", "settle")
"""Commands after which the records are older than the log."""


@dataclass(slots=True)
class CaughtUp:
    """What the newer log changed, for people.

    `released` has each sum's number in the ledger, its plan and the entry's digest, `signed` those of them that
    somebody signed; `in_doubt` the plans that an earlier `restore` may have closed.
    """

    entries: int = 0
    unsigned: range = range(0)
    revoked: list[str] = field(default_factory=list)
    let_in: list[str] = field(default_factory=list)
    to_invite: list[str] = field(default_factory=list)
    offered: set[Digest] = field(default_factory=set)
    released: set[tuple[int, Digest, str]] = field(default_factory=set)
    signed: set[tuple[int, Digest, str]] = field(default_factory=set)
    forgotten: bool = False
    in_doubt: set[Digest] = field(default_factory=set)
    authorities_changed: bool = False


def later_log(folder: Path, before: LogPlace, *, writer: str, key: Ed25519PublicKey) -> tuple[Reading, int]:
    """The log in `folder`, and how many of its entries `before` has. Raises IntegrityError where it does not go on from
    that."""
    newer = read_log(folder, writer=writer, keys=[key])
    if next(before.lines(), None) is None:
        return newer, 0
    older = read_log(before, writer=writer, keys=[key])
    newer.walk.check_known([Known(head=older.walk.position.head, by=f"the log in {before.where}")], newer.where)
    return newer, len(older.entries)


def catch_up(
    transaction: AbstractContextManager[Connection], federation: FederationName, reading: Reading, since: int
) -> CaughtUp:
    """Bring the records, in a `transaction` of their database, to what the entries after `since` say. Raises
    StorageError naming it."""
    unsigned = unsigned_in(reading)
    done = CaughtUp(
        entries=len(reading.entries) - since,
        unsigned=unsigned.ranges[0],
    )

    def is_signed(entry: Entry) -> bool:
        return entry.sequence not in unsigned

    # Of all entries: a backup has the ledger as it was some entries before the log.
    sums = list(reading.of(Event.SUM_RELEASED))
    done.released.update(_sum_of(entry) for entry in sums if entry.sequence <= since)
    done.signed.update(map(_sum_of, filter(is_signed, sums)))
    with transaction as connection:
        for identity, at in _shut_out(reading.entries[:since], federation):
            if _revoke(connection, identity, at):
                done.revoked.append(identity.uri)
        for entry in reading.entries[since:]:
            _take(connection, federation, entry, done, sealed=is_signed(entry))
    return done


def is_put_back(entry: Entry) -> bool:
    """Whether it tells of a command after which the records are older than the log."""
    return entry.event is Event.OPERATOR_COMMAND and entry.text("command") in PUT_BACK


@dataclass(slots=True)
class Unsigned:
    """The entries of a log that nobody signed: `sequence in`. `take` its commands newest first: each that says of
    others that nobody signed them was signed itself, or says nothing."""

    ranges: list[range] = field(default_factory=list)

    def take(self, entry: Entry) -> None:
        if is_put_back(entry) and entry.sequence not in self:
            self.ranges.append(_unsigned_before(entry))

    def __contains__(self, sequence: int) -> bool:
        return any(sequence in one for one in self.ranges)


def unsigned_in(reading: Reading) -> Unsigned:
    """Those at its end first."""
    position = reading.walk.position
    unsigned = Unsigned([range(position.sealed + 1, position.head.sequence + 1)])
    for entry in reversed(reading.entries):
        unsigned.take(entry)
    return unsigned


def particulars_of(done: CaughtUp | None, *, ledger: bool) -> dict[str, str]:
    """What the entry `restore` says of the log that it follows, and of the ledger."""
    newer_ledger = "yes" if ledger else "no"
    if done is None:
        return {"newer_log": "no", "newer_ledger": newer_ledger}
    return {
        "newer_log": "yes",
        "newer_ledger": newer_ledger,
        "unsigned_from": str(done.unsigned.start),
        "unsigned_to": str(done.unsigned.stop),
    }


def _unsigned_before(entry: Entry) -> range:
    """The entries that no seal covered when a coordinator was restored with their log."""
    if not is_put_back(entry) or entry.text("newer_log") != "yes":
        return range(0)
    try:
        return range(int(entry.text("unsigned_from")), int(entry.text("unsigned_to")))
    except ValueError:
        return range(entry.sequence)  # of another shape: nothing before it is taken for signed


def _take(connection: Connection, federation: FederationName, entry: Entry, done: CaughtUp, *, sealed: bool) -> None:
    match entry.event:
        case Event.OPERATOR_COMMAND if entry.text("command") == "Revoke":
            if (identity := _asked_of(entry, federation)) is not None:
                _revoke(connection, identity, entry.at)
                done.revoked.append(identity.uri)
        case Event.OPERATOR_COMMAND if is_put_back(entry) and entry.text("newer_ledger") != "yes":
            done.forgotten = True
            done.in_doubt = {*done.offered, *(plan for _, plan, _ in done.released)}
        case Event.ENROLLED | Event.CERTIFICATE_RENEWED if not sealed or not entry.text("certificate_digest"):
            silo = silo_name(entry.text("silo"))
            if entry.event is Event.ENROLLED:  # that shut out who was enrolled before
                _revoke(connection, Identity(federation, Role.SILO, silo), entry.at)
            done.to_invite.append(silo)
        case Event.ENROLLED:
            _enrol(connection, federation, entry)
            done.let_in.append(entry.text("silo"))
        case Event.CERTIFICATE_RENEWED:
            silo = silo_name(entry.text("silo"))
            present = and_(silos.c.silo == silo, silos.c.revoked_at.is_(None))
            if connection.execute(update(silos).where(present).values(**_certificate_of_silo(entry))).rowcount:
                _register(connection, Identity(federation, Role.SILO, silo), entry)
                done.let_in.append(silo)
        case Event.IDENTITY_SUCCEEDED if sealed:
            named = and_(
                silos.c.silo == silo_name(entry.text("silo")),
                silos.c.identity_public_key == bytes.fromhex(entry.text("predecessor")),
            )
            key = bytes.fromhex(entry.text("identity_key"))
            connection.execute(update(silos).where(named).values(identity_public_key=key))
        case Event.ACCESS_GRANTED if sealed and entry.text("certificate_digest"):
            identity = Identity.from_uri(entry.text("to"))
            let_in = entry.who != identity.uri or has_good_certificate(connection, identity, entry.at)
            if identity.role in (Role.OPERATOR, Role.VIEWER) and let_in:
                _register(connection, identity, entry)
                done.let_in.append(identity.uri)
        case Event.SUM_RELEASED:
            done.released.add(_sum_of(entry))
        case Event.PLAN_OFFERED:
            done.offered.add(Digest(entry.text("plan")))
        case Event.AUTHORITY_CHANGED:
            done.authorities_changed = True


def _shut_out(entries: Iterable[Entry], federation: FederationName) -> list[tuple[Identity, int]]:
    """Who was shut out and not let in since, and when. The log hears of it first: records that were copied right then,
    or before the log was, have them in."""
    shut_out: dict[str, tuple[Identity, int]] = {}
    for entry in entries:
        match entry.event:
            case Event.OPERATOR_COMMAND if entry.text("command") == "Revoke":
                if (identity := _asked_of(entry, federation)) is not None:
                    shut_out[identity.uri] = identity, entry.at
            case Event.ENROLLED:
                shut_out.pop(Identity(federation, Role.SILO, silo_name(entry.text("silo"))).uri, None)
            case Event.ACCESS_GRANTED if entry.who != entry.text("to"):
                shut_out.pop(entry.text("to"), None)
    return list(shut_out.values())


def _sum_of(entry: Entry) -> tuple[int, Digest, str]:
    return entry.number("ledger_entry"), Digest(entry.text("plan")), entry.text("ledger_digest")


def _asked_of(entry: Entry, federation: FederationName) -> Identity | None:
    """Whom a command `Revoke` shut out; None where it was refused for what it named: it stands in the log before
    anybody looks at that."""
    try:
        identity = Identity(federation, Role(entry.text("asked_role")), entry.text("asked_name"))
    except (ValueError, ConfigurationError):
        return None
    hosts_own = identity.role is Role.OPERATOR and identity.name == OPERATOR_NAME
    return None if hosts_own or identity.role is Role.COORDINATOR else identity


def _revoke(connection: Connection, identity: Identity, at: float) -> bool:
    """Whether there was anything to revoke."""
    good = and_(certificates.c.uri == identity.uri, certificates.c.revoked_at.is_(None))
    count = connection.execute(update(certificates).where(good).values(revoked_at=at)).rowcount
    if identity.role is Role.SILO:
        present = and_(silos.c.silo == identity.name, silos.c.revoked_at.is_(None))
        count += connection.execute(update(silos).where(present).values(revoked_at=at)).rowcount
    return count > 0


def _enrol(connection: Connection, federation: FederationName, entry: Entry) -> None:
    """In place of all that the silo had."""
    silo = SiloName(silo_name(entry.text("silo")))
    identity = Identity(federation, Role.SILO, silo)
    _revoke(connection, identity, entry.at)
    values = {
        "identity_public_key": bytes.fromhex(entry.text("identity_key")),
        **_certificate_of_silo(entry),
        "enrolled_at": entry.at,
        "revoked_at": None,
    }
    if connection.execute(update(silos).where(silos.c.silo == silo).values(**values)).rowcount == 0:
        connection.execute(insert(silos).values(silo=silo, last_seen=0.0, **values))
    _register(connection, identity, entry)
    connection.execute(delete(held_trust).where(held_trust.c.uri == identity.uri))


def _certificate_of_silo(entry: Entry) -> dict[str, object]:
    return {
        "certificate_serial": entry.text("certificate"),
        "certificate_digest": entry.text("certificate_digest"),
        "certificate_expires": float(entry.number("expires")),
    }


def _register(connection: Connection, identity: Identity, entry: Entry) -> None:
    """Anew where it is there: the log was taken before, by a settling that was cut off, which shut it out again by an
    entry that comes before this one."""
    serial = entry.text("certificate")
    again = update(certificates).where(certificates.c.serial == serial).values(revoked_at=None)
    if connection.execute(again).rowcount == 0:
        connection.execute(
            insert(certificates).values(
                serial=serial,
                digest=entry.text("certificate_digest"),
                uri=identity.uri,
                issued_at=float(entry.at),
                expires_at=float(entry.number("expires")),
            )
        )


@contextmanager
def records_in(database: Path) -> Iterator[Connection]:
    """A transaction of an SQLite file that nobody has open."""
    engine = database_engine(database)
    try:
        with engine.begin() as connection:
            yield connection
    except (SQLAlchemyError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise StorageError(f"{database} cannot be brought up to date with the newer log ({reason})") from error
    finally:
        engine.dispose()
