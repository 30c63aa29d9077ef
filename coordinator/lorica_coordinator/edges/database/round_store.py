"""The coordinator's durable state in a database: the machine's state and the records of each transition, together or
not at all.

SQLite with a write-ahead log and full synchronisation: what a method wrote is on the disk when it returns. The same
statements suit PostgreSQL; only the connection's settings are SQLite's own.

The events of a masked attempt have the key shares that silos revealed for it. What is deleted or replaced is
overwritten, and when an attempt has ended, the write-ahead log is emptied, too: no file has them any more. A disk that
keeps old blocks does.
"""

import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
from sqlalchemy import ColumnElement, Connection, Table, and_, delete, exists, func, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from lorica_coordinator.edges.database import round_history
from lorica_coordinator.edges.database.certificate_records import (
    hold_trust,
    register_certificate,
    revoke_certificates,
    send_trust,
)
from lorica_coordinator.edges.database.masked_events import read_events, write_events
from lorica_coordinator.edges.database.round_records import of_attempt, put_row, write_record
from lorica_coordinator.edges.database.round_tables import (
    TABLES_REVISION,
    TABLES_VERSION,
    certificates,
    checkpoints,
    evaluations,
    held_trust,
    invitations,
    ledger_heads,
    machine,
    metadata,
    plans,
    release_groups,
    revisions,
    rounds,
    schema,
    silos,
    successions,
    updates,
)
from lorica_coordinator.edges.database.rows import certificate_of, evaluation_of, silo_of
from lorica_coordinator.edges.database.sqlite_database import BUSY_TIMEOUT_MS, durable_engine
from lorica_coordinator.edges.database.state_json import (
    STATE_VERSION,
    journal_of,
    state_from_json,
    state_to_json,
)
from lorica_coordinator.edges.database.tables_revision import require_current, revision_of
from lorica_coordinator.rounds.effects import Record
from lorica_coordinator.rounds.states import Idle, State
from lorica_coordinator.service.issued import Certificate, IssuedCertificate
from lorica_coordinator.service.records import (
    BegunPlan,
    EnrolledSilo,
    HeldTrust,
    Invitation,
    RoundRow,
    SignedModel,
)
from lorica_security.audit.chain import Head
from lorica_security.errors import AuthenticationError, Conflict, StateError, StorageError
from lorica_security.host import ballast
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.identity.succession import MOST_SUCCESSIONS, Succession
from lorica_security.secure_aggregation.groups.release_groups import SignedLink
from silo_wire.canonical import Digest
from silo_wire.codecs.groups_codec import signed_groups_from_bytes, signed_groups_to_bytes
from silo_wire.messages import Evaluation, RoundKey
from silo_wire.wire_version import Speaker

_log = structlog.get_logger(__name__)
_MACHINE_ID = 1
_FULL = "disk is full"
"""What SQLite says of SQLITE_FULL."""


class SqlRoundStore:
    """Implements `lorica_coordinator.service.ports.RoundStore`. Safe to call from several threads."""

    def __init__(self, path: Path, federation: FederationName) -> None:
        """Open or create the database file; raises StorageError naming it, also for tables of another release."""
        self._path = path
        self._federation = federation
        self._database = durable_engine(path)
        self._events: tuple[bytes, ...] | None = None  # of the masked attempt, as the rows have them; None: not known
        self._log_is_clear = False  # an earlier process may have been killed before it cleared its log
        with self._transaction() as connection:
            revision = revision_of(connection)
            if revision is None:
                metadata.create_all(connection)
                connection.execute(insert(revisions).values(version_num=TABLES_REVISION))
                connection.execute(insert(schema).values(version=TABLES_VERSION))
            else:
                require_current(revision, path)

    def close(self) -> None:
        if not self._log_is_clear:
            self._clear_log()
        self._database.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """One transaction, and after it the log that could not be emptied yet: whoever read it may be gone."""
        try:
            with self._database.begin() as connection:
                yield connection
        except SQLAlchemyError as error:
            reason = " ".join(str(error.__cause__ or error).split())
            if _FULL in reason:
                ballast.give_up_above(self._path)  # whoever tries again has room
            raise StorageError(
                f"{self._path} cannot be read or written ({reason}): check the disk's free space and the permissions, "
                "or restore the file from backup"
            ) from error
        if not self._log_is_clear:
            self._clear_log()

    # --- the machine

    def load(self, now: float = 0.0) -> State:
        with self._transaction() as connection:
            row = connection.execute(select(machine).where(machine.c.id == _MACHINE_ID)).one_or_none()
            if row is None:
                names = connection.execute(select(silos.c.silo).where(silos.c.revoked_at.is_(None))).scalars()
                return Idle(population=frozenset(SiloName(name) for name in names))
            events = read_events(connection, row.events, str(self._path))
        self._events = events
        stored = {"version": row.version, "phase": row.phase, "text": row.state, "journal": events}
        return state_from_json(**stored, where=str(self._path), now=now)

    def transition(self, state: State, records: Sequence[Record], *, at: float, now: float) -> None:
        events = journal_of(state)
        text = state_to_json(state, now=now)
        values = {"version": STATE_VERSION, "phase": state.phase, "state": text, "events": len(events)}
        before, self._events = self._events, None  # a transaction that fails may be on the disk or not
        with self._transaction() as connection:
            for record in records:
                write_record(connection, record, at)
            put_row(connection, machine, {"id": _MACHINE_ID}, values)
            if write_events(connection, before, events):
                self._log_is_clear = False
        self._events = events

    def _clear_log(self) -> None:
        """Bring the log's pages into the database and empty it; where another process reads just now, after a later
        transaction."""
        connection = self._database.raw_connection()
        cursor = connection.cursor()
        try:
            cursor.execute("PRAGMA busy_timeout = 0")
            busy, _, _ = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._log_is_clear = not busy
        except sqlite3.Error as error:
            _log.warning("the write-ahead log could not be emptied, it is tried again", error=str(error))
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            connection.close()

    # --- silos and invitations

    def silos(self) -> tuple[EnrolledSilo, ...]:
        with self._transaction() as connection:
            return tuple(silo_of(row) for row in connection.execute(select(silos).order_by(silos.c.silo)))

    def silo(self, name: SiloName) -> EnrolledSilo | None:
        with self._transaction() as connection:
            row = connection.execute(select(silos).where(silos.c.silo == name)).one_or_none()
        return None if row is None else silo_of(row)

    def seen(self, name: SiloName, at: float, speaker: Speaker | None = None) -> None:
        told = {} if speaker is None else {"agent_version": speaker.release, "agent_wire": str(speaker.wire)}
        with self._transaction() as connection:
            connection.execute(update(silos).where(silos.c.silo == name).values(last_seen=at, **told))

    def announced(self) -> dict[SiloName, bytes]:
        with self._transaction() as connection:
            rows = connection.execute(select(silos.c.silo, silos.c.announced).where(silos.c.announced.is_not(None)))
            return {SiloName(row.silo): row.announced for row in rows}

    def announce(self, name: SiloName, advertisement: bytes) -> None:
        with self._transaction() as connection:
            connection.execute(update(silos).where(silos.c.silo == name).values(announced=advertisement))

    def invite(self, invitation: Invitation) -> None:
        with self._transaction() as connection:
            still_open = and_(invitations.c.silo == invitation.silo, invitations.c.spent_at.is_(None))
            connection.execute(delete(invitations).where(still_open))
            connection.execute(
                insert(invitations).values(
                    secret_digest=invitation.secret_digest,
                    silo=invitation.silo,
                    expires_at=invitation.expires_unix_s,
                    pin=invitation.pin,
                )
            )

    def invitations(self) -> tuple[Invitation, ...]:
        query = select(invitations).where(invitations.c.spent_at.is_(None)).order_by(invitations.c.silo)
        with self._transaction() as connection:
            return tuple(
                Invitation(
                    silo=SiloName(row.silo),
                    secret_digest=row.secret_digest,
                    expires_unix_s=row.expires_at,
                    pin=row.pin,
                )
                for row in connection.execute(query)
            )

    def spent_at(self, silo: SiloName, secret_digest: bytes) -> float | None:
        query = select(invitations.c.spent_at).where(
            invitations.c.secret_digest == secret_digest, invitations.c.silo == silo
        )
        with self._transaction() as connection:
            return connection.execute(query).scalar_one_or_none()

    def void_invitations(self, *, pins: Collection[str]) -> None:
        foreign = and_(invitations.c.spent_at.is_(None), invitations.c.pin.not_in(pins))
        with self._transaction() as connection:
            connection.execute(delete(invitations).where(foreign))

    def enrol(self, silo: EnrolledSilo, *, secret_digest: bytes, authority: str = "", trust: str = "") -> None:
        now = silo.enrolled_unix_s
        spend = (
            update(invitations)
            .where(
                invitations.c.secret_digest == secret_digest,
                invitations.c.silo == silo.silo,
                invitations.c.spent_at.is_(None),
                invitations.c.expires_at > now,
            )
            .values(spent_at=now)
        )
        with self._transaction() as connection:
            if connection.execute(spend).rowcount != 1:
                raise AuthenticationError(
                    f"invitation of silo {silo.silo} is spent, expired or replaced: "
                    f"have a new one made with `coordinator invite {silo.silo}`"
                )
            put_row(
                connection,
                silos,
                {"silo": silo.silo},
                {
                    "identity_public_key": silo.identity_public_key,
                    "certificate_serial": silo.certificate_serial,
                    "certificate_digest": silo.certificate_digest,
                    "certificate_expires": silo.certificate_expires_unix_s,
                    "enrolled_at": now,
                    "last_seen": silo.last_seen_unix_s,
                    "revoked_at": None,
                },
            )
            identity = Identity(self._federation, Role.SILO, silo.silo)
            certificate = Certificate(
                serial=silo.certificate_serial,
                digest=silo.certificate_digest,
                identity=identity,
                issued_unix_s=now,
                expires_unix_s=silo.certificate_expires_unix_s,
            )
            revoke_certificates(connection, identity, now)
            register_certificate(connection, certificate)
            hold_trust(connection, identity, authority=authority, trust=trust)

    # --- the register of certificates

    def certificates(self) -> tuple[Certificate, ...]:
        with self._transaction() as connection:
            found = connection.execute(select(certificates).order_by(certificates.c.issued_at, certificates.c.serial))
            return tuple(certificate_of(row) for row in found)

    def register(self, certificate: Certificate) -> None:
        with self._transaction() as connection:
            register_certificate(connection, certificate)

    def grant(self, certificate: IssuedCertificate, *, trust: str) -> None:
        entry = certificate.entry
        good = and_(
            certificates.c.uri == entry.identity.uri,
            certificates.c.revoked_at.is_(None),
            certificates.c.expires_at > entry.issued_unix_s,
        )
        with self._transaction() as connection:
            had_access = connection.execute(select(certificates.c.serial).where(good).limit(1)).first() is not None
            register_certificate(connection, entry)
            if had_access:
                send_trust(connection, certificate, trust)
            else:
                hold_trust(connection, entry.identity, authority=certificate.authority, trust=trust)

    def revoke(self, identity: Identity, at: float) -> None:
        with self._transaction() as connection:
            revoke_certificates(connection, identity, at)
            if identity.role is Role.SILO:
                present = and_(silos.c.silo == identity.name, silos.c.revoked_at.is_(None))
                connection.execute(update(silos).where(present).values(revoked_at=at))
                still_open = and_(invitations.c.silo == identity.name, invitations.c.spent_at.is_(None))
                connection.execute(delete(invitations).where(still_open))

    def renew(
        self, silo: SiloName, certificate: IssuedCertificate, *, identity_public_key: bytes, trust: str, at: float
    ) -> None:
        values = {
            "certificate_serial": certificate.entry.serial,
            "certificate_digest": certificate.entry.digest,
            "certificate_expires": certificate.entry.expires_unix_s,
            "last_seen": at,
        }
        # The key that endorsed the request: a renewal under way must not outlive an enrolment that replaced it.
        enrolled = and_(
            silos.c.silo == silo,
            silos.c.revoked_at.is_(None),
            silos.c.identity_public_key == identity_public_key,
        )
        with self._transaction() as connection:
            if connection.execute(update(silos).where(enrolled).values(**values)).rowcount != 1:
                raise StateError(f"silo {silo} is not enrolled any longer: invite it again")
            register_certificate(connection, certificate.entry)
            send_trust(connection, certificate, trust)

    def held_trust(self) -> Mapping[Identity, HeldTrust]:
        with self._transaction() as connection:
            return {
                Identity.from_uri(row.uri): HeldTrust(authority=row.authority, trust=row.trust, sent=row.sent_serial)
                for row in connection.execute(select(held_trust))
            }

    def has_arrived(self, identity: Identity, serial: str) -> None:
        sent = and_(held_trust.c.uri == identity.uri, held_trust.c.sent_serial == serial)
        arrived = {"authority": held_trust.c.sent_authority, "trust": held_trust.c.sent_trust, "sent_serial": ""}
        with self._transaction() as connection:
            connection.execute(update(held_trust).where(sent).values(**arrived))

    def succeed(self, silo: SiloName, succession: Succession, *, at: float) -> None:
        old, new = public_key_bytes(succession.predecessor), public_key_bytes(succession.successor)
        present = and_(silos.c.silo == silo, silos.c.identity_public_key == old)
        values = {"successor": new, "statement": succession.statement, "succeeded_at": at}
        with self._transaction() as connection:
            if connection.execute(update(silos).where(present).values(identity_public_key=new)).rowcount != 1:
                raise Conflict(f"the identity key that silo {silo} succeeds is not the one that is enrolled")
            put_row(connection, successions, {"silo": silo, "predecessor": old}, values)

    def successions(self, silo: SiloName) -> tuple[Succession, ...]:
        with self._transaction() as connection:
            present = connection.execute(select(silos.c.identity_public_key).where(silos.c.silo == silo)).scalar()
            rows = connection.execute(select(successions).where(successions.c.silo == silo)).all()
        steps: list[Succession] = []
        by_successor = {row.successor: row for row in rows}
        while present in by_successor and len(steps) < MOST_SUCCESSIONS:
            row = by_successor.pop(present)
            present = row.predecessor
            steps.append(
                Succession.of_bytes(predecessor=row.predecessor, successor=row.successor, statement=row.statement)
            )
        return tuple(reversed(steps))

    # --- privacy ledgers

    def countersign_ledger(self, silo: SiloName, head: Head, *, after: Head, at: float) -> Head:
        known = ledger_heads.c
        follows = and_(
            known.silo == silo,
            known.sequence == after.sequence,
            known.digest == after.digest,
            known.sequence < head.sequence,
        )
        values = {"sequence": head.sequence, "digest": head.digest, "shown_at": at}
        with self._transaction() as connection:  # the update comes first: it takes the lock for writing
            if connection.execute(update(ledger_heads).where(follows).values(**values)).rowcount:
                return head
            row = connection.execute(select(ledger_heads).where(known.silo == silo)).one_or_none()
            if row is None:
                connection.execute(insert(ledger_heads).values(silo=silo, **values))
                return head
        return Head(row.sequence, row.digest)

    # --- release groups

    def release_groups(self) -> tuple[tuple[SignedLink, ...], SignedLink | None]:
        with self._transaction() as connection:
            rows = connection.execute(select(release_groups).order_by(release_groups.c.number)).all()
        read = [(row, signed_groups_from_bytes(row.signed, self._federation)) for row in rows]
        proposed = [signed for row, signed in read if not row.stands]
        return tuple(signed for row, signed in read if row.stands), proposed[0] if proposed else None

    def keep_release_groups(self, signed: SignedLink, *, stands: bool) -> None:
        values = {
            "number": signed.link.number,
            "stands": stands,
            "colluders": signed.link.promise.colluders,
            "signed": signed_groups_to_bytes(signed),
        }
        with self._transaction() as connection:
            replaced = and_(release_groups.c.stands.is_(False), release_groups.c.number <= signed.link.number)
            connection.execute(delete(release_groups).where(replaced))
            put_row(connection, release_groups, {"digest": signed.link.digest.hex()}, values)

    # --- rounds

    def has_rounds(self, plan: Digest) -> bool:
        with self._transaction() as connection:
            return connection.execute(select(rounds.c.round).where(rounds.c.plan == plan).limit(1)).first() is not None

    def plans(self) -> tuple[BegunPlan, ...]:
        closed = select(rounds.c.plan, func.max(rounds.c.closed_at).label("at")).group_by(rounds.c.plan).subquery()
        query = select(plans, closed.c.at).outerjoin(closed, closed.c.plan == plans.c.digest)
        with self._transaction() as connection:
            return tuple(
                BegunPlan(
                    digest=Digest(row.digest),
                    name=row.name,
                    begun_unix_s=row.begun_at,
                    active_unix_s=max(row.begun_at, row.at or 0.0),
                )
                for row in connection.execute(query)
            )

    def count_details(self, before: float) -> int:
        """Updates and scores of single silos, of rounds that were closed before this instant."""
        with self._transaction() as connection:
            return sum(
                connection.execute(
                    select(func.count()).select_from(table).where(_closed_before(table, before))
                ).scalar_one()
                for table in (updates, evaluations)
            )

    def forget_details(self, before: float) -> None:
        """Delete what `count_details` counts; the rounds stay, with their sums and averages."""
        with self._transaction() as connection:
            for table in (updates, evaluations):
                connection.execute(delete(table).where(_closed_before(table, before)))

    def signed_model(self, plan: Digest, model: Digest) -> SignedModel | None:
        query = select(checkpoints).where(checkpoints.c.plan == plan, checkpoints.c.model == model)
        with self._transaction() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else SignedModel(model=model, round=row.round, signature=row.signature)

    def committed_update(self, key: RoundKey, silo: SiloName) -> Digest | None:
        query = select(updates.c.update_digest).where(*of_attempt(updates, key), updates.c.silo == silo)
        with self._transaction() as connection:
            digest = connection.execute(query).scalar_one_or_none()
        return None if digest is None else Digest(digest)

    def evaluation(self, key: RoundKey, silo: SiloName) -> Evaluation | None:
        query = select(evaluations).where(*of_attempt(evaluations, key), evaluations.c.silo == silo)
        with self._transaction() as connection:
            row = connection.execute(query).one_or_none()
        return None if row is None else evaluation_of(row)

    def closed_attempts(self, last: int) -> tuple[RoundKey, ...]:
        query = select(rounds).where(rounds.c.closed_at.is_not(None)).order_by(rounds.c.closed_at.desc()).limit(last)
        with self._transaction() as connection:
            return tuple(
                RoundKey(federation=self._federation, plan=Digest(row.plan), round=row.round, attempt=row.attempt)
                for row in connection.execute(query)
            )

    def newest_round(self, plan: Digest) -> int | None:
        with self._transaction() as connection:
            return round_history.newest_round(connection, plan)

    def details_of(self, plan: Digest, through: int) -> int:
        with self._transaction() as connection:
            return round_history.count_details(connection, plan, through)

    def rounds(self, plan: Digest, last: int, since: int = 0, until: int | None = None) -> tuple[RoundRow, ...]:
        with self._transaction() as connection:
            return round_history.read_rounds(connection, plan, last=last, since=since, until=until)


def _closed_before(table: Table, before: float) -> ColumnElement[bool]:
    """Whether the round of a row was closed before, in whatever attempt; a later one of the same number is not."""
    same = and_(rounds.c.plan == table.c.plan, rounds.c.round == table.c.round)
    return and_(
        exists(select(rounds.c.round).where(same, rounds.c.closed_at < before).correlate(table)),
        ~exists(
            select(rounds.c.round)
            .where(same, or_(rounds.c.closed_at.is_(None), rounds.c.closed_at >= before))
            .correlate(table)
        ),
    )
