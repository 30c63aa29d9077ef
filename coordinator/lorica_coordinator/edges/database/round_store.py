"""The coordinator's durable state in a database: the machine's state and the records of each transition, together or
not at all.

SQLite in a file, or PostgreSQL: what a method wrote is durable when it returns. The statements are the same.

The events of a masked attempt have the key shares that silos revealed for it. In SQLite what is deleted or replaced is
overwritten, and when an attempt has ended, the write-ahead log is emptied, too: no file has them any more. A disk that
keeps old blocks does. PostgreSQL keeps everything: there they are sealed (sealing/attempt_seal.py), and the key goes.
"""

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog
from sqlalchemy import Connection, and_, delete, func, insert, or_, select, update
from sqlalchemy.exc import SQLAlchemyError

from lorica_coordinator.edges.database import round_history
from lorica_coordinator.edges.database.certificate_records import (
    has_good_certificate,
    hold_trust,
    register_certificate,
    revoke_certificates,
    send_trust,
)
from lorica_coordinator.edges.database.masked_events import write_events
from lorica_coordinator.edges.database.postgresql.server import PostgresqlDatabase
from lorica_coordinator.edges.database.postgresql.tries import in_tries
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
from lorica_coordinator.edges.database.sealing.attempt_keys import KeyVault
from lorica_coordinator.edges.database.sealing.sealed_states import SealedStates
from lorica_coordinator.edges.database.sqlite_database import SqliteDatabase
from lorica_coordinator.edges.database.state_json import STATE_VERSION, journal_of
from lorica_coordinator.edges.database.tables_revision import require_current, revision_of
from lorica_coordinator.rounds.effects import Record
from lorica_coordinator.rounds.states import Idle, State
from lorica_coordinator.service.issued import Certificate, IssuedCertificate
from lorica_coordinator.service.ports import Overtaken
from lorica_coordinator.service.records import BegunPlan, EnrolledSilo, HeldTrust, Invitation, RoundRow, SignedModel
from lorica_security.audit.chain import Head
from lorica_security.errors import AuthenticationError, AuthorisationError, Conflict, StateError, StorageError
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
_DETAILS = (updates, evaluations)
"""Tables of what single silos sent and scored."""


@in_tries
class SqlRoundStore:
    """Implements `lorica_coordinator.service.ports.RoundStore`. Safe to call from several threads."""

    def __init__(
        self,
        place: Path | PostgresqlDatabase,
        federation: FederationName,
        vault: KeyVault | None = None,
        fence: Callable[[Connection], None] | None = None,
    ) -> None:
        """Open the database, or make its tables; with a `vault` masked attempts are sealed under its keys. `fence`
        begins each transaction, and raises where this process may not do it.

        Raises StorageError naming it, also for tables of another release, ConfigurationError for another server.
        """
        self.place = SqliteDatabase(place) if isinstance(place, Path) else place
        self._federation = federation
        self._database = self.place.engine
        self._states = SealedStates(vault, federation)
        self._in_doubt: set[str] = set()  # transitions that failed, and may be saved all the same
        self._newest: str | None = None  # the transition that was saved or loaded last
        self._events: tuple[bytes, ...] | None = None  # of the masked attempt, as the rows have them; None: not known
        self._log_is_clear = False  # an earlier process may have been killed before it cleared its log
        self._fence: Callable[[Connection], None] | None = None
        with self._transaction() as connection:
            self.place.require_supported(connection)
            revision = revision_of(connection)
            if revision is None and fence is not None:
                raise StorageError(f"{self.place.name} has no tables yet: `coordinator serve` makes them")
            if revision is None:
                metadata.create_all(connection)
                connection.execute(insert(revisions).values(version_num=TABLES_REVISION))
                connection.execute(insert(schema).values(version=TABLES_VERSION))
            else:
                require_current(revision, self.place.name)
        self._fence = fence

    def close(self) -> None:
        if not self._log_is_clear:
            self._clear_log()
        self._database.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """One transaction, and after it the log that could not be emptied yet: whoever read it may be gone."""
        try:
            with self._database.begin() as connection:
                if self._fence is not None:
                    self._fence(connection)
                yield connection
        except SQLAlchemyError as error:
            raise self.place.failed(error) from error
        if not self._log_is_clear:
            self._clear_log()

    # --- the machine

    def load(self, now: float = 0.0) -> State:
        with self._transaction() as connection:
            row = connection.execute(select(machine).where(machine.c.id == _MACHINE_ID)).one_or_none()
            if row is None:
                names = connection.execute(select(silos.c.silo).where(silos.c.revoked_at.is_(None))).scalars()
                return Idle(population=frozenset(SiloName(name) for name in names))
            state, events = self._states.read(connection, row, where=self.place.name, now=now)
            self._newest = row.saved_as
        self._events = None if self._states.lost is not None else events
        return state

    def lost_attempt(self) -> bool | None:
        return self._states.lost

    def transition(self, state: State, records: Sequence[Record], *, at: float, now: float) -> None:
        events, saved_as = journal_of(state), secrets.token_hex(16)
        values = {"version": STATE_VERSION, "phase": state.phase, "events": len(events), "saved_as": saved_as}
        before, self._events = self._events, None  # a transaction that fails may be on the disk or not
        deleted, attempt = False, None
        with self._unless_saved(saved_as), self._transaction() as connection:
            self._require_newest(connection)
            self._in_doubt.add(saved_as)
            for record in records:
                write_record(connection, record, at)
            columns, attempt = self._states.columns(state, now=now)
            put_row(connection, machine, {"id": _MACHINE_ID}, values | columns)
            if deleted := write_events(connection, before, events, self._states.event):
                self._log_is_clear = False
        self._events, self._newest = events, saved_as
        self._in_doubt.clear()
        self._states.saved(attempt, deleted=deleted)

    def _require_newest(self, connection: Connection) -> None:
        """Raises Overtaken where a transition is saved after all whose caller was told that it is not, or the newest
        is none of this process's: a server that lost it, or was brought back of another instant."""
        if not self.place.answers_may_be_lost:
            return
        newest = connection.execute(select(machine.c.saved_as)).scalar()
        if newest in self._in_doubt:
            raise Overtaken("the database saved a transition whose answer was lost on the way: start again")
        if self._newest is not None and newest != self._newest:
            raise Overtaken("the newest transition in the database is not the one that was saved last: start again")

    @contextmanager
    def _unless_saved(self, saved_as: str) -> Iterator[None]:
        """No error where the answer alone was lost."""
        try:
            yield
        except StorageError:
            if not self.place.answers_may_be_lost or not self._is_saved(saved_as):
                raise

    def _is_saved(self, saved_as: str) -> bool:
        try:
            with self._transaction() as connection:
                saved = connection.execute(select(machine.c.saved_as)).scalar() == saved_as
        except StorageError:
            return False  # and it stays in doubt
        return saved  # what is not saved yet stays in doubt: the server may be about to

    def _clear_log(self) -> None:
        self._log_is_clear = self.place.clear_log()

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

    def grant(self, certificate: IssuedCertificate, *, trust: str, renews: bool = False) -> None:
        entry = certificate.entry
        with self._transaction() as connection:
            had_access = has_good_certificate(connection, entry.identity, entry.issued_unix_s)
            if renews and not had_access:
                raise AuthorisationError(f"{entry.identity.uri} was revoked meanwhile: ask the coordinator's operator")
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
        with self._transaction() as connection:
            return round_history.read_plans(connection)

    def count_details(self, before: float) -> int:
        """Updates and scores of single silos, of rounds that were closed before this instant."""
        with self._transaction() as connection:
            return sum(
                connection.execute(
                    select(func.count()).select_from(table).where(round_history.closed_before(table, before))
                ).scalar_one()
                for table in _DETAILS
            )

    def forget_details(self, before: float) -> None:
        """Delete what `count_details` counts; the rounds stay, with their sums and averages, and each plan that it was
        of has one more of its deletions."""
        with self._transaction() as connection:
            gone = [select(it.c.plan).where(round_history.closed_before(it, before)) for it in _DETAILS]
            lose = or_(*(plans.c.digest.in_(of_table) for of_table in gone))
            connection.execute(update(plans).where(lose).values(deletions=plans.c.deletions + 1))
            for table in _DETAILS:
                connection.execute(delete(table).where(round_history.closed_before(table, before)))

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

    def rounds(
        self, plan: Digest, last: int, since: int = 0, until: int | None = None, attempts: int = 0
    ) -> tuple[RoundRow, ...]:
        with self._transaction() as connection:
            return round_history.read_rounds(connection, plan, last=last, since=since, until=until, attempts=attempts)
