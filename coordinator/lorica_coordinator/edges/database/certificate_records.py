"""The register of certificates in the tables: entries, revocations, and what their holders were sent."""

from sqlalchemy import Connection, and_, delete, insert, select, update

from lorica_coordinator.edges.database.round_records import put_row
from lorica_coordinator.edges.database.round_tables import certificates, held_trust
from lorica_coordinator.edges.database.rows import certificate_row
from lorica_coordinator.service.issued import Certificate, IssuedCertificate
from lorica_security.identifiers import Identity

EXPIRED_KEPT_S = 30 * 86_400.0


def revoke_certificates(connection: Connection, identity: Identity, at: float) -> None:
    still_good = and_(certificates.c.uri == identity.uri, certificates.c.revoked_at.is_(None))
    connection.execute(update(certificates).where(still_good).values(revoked_at=at))


def has_good_certificate(connection: Connection, identity: Identity, at: float) -> bool:
    """One that is neither revoked nor ends before `at`."""
    good = and_(certificates.c.uri == identity.uri, certificates.c.revoked_at.is_(None), certificates.c.expires_at > at)
    return connection.execute(select(certificates.c.serial).where(good).limit(1)).first() is not None


def hold_trust(connection: Connection, identity: Identity, *, authority: str, trust: str) -> None:
    values = {"authority": authority, "trust": trust, "sent_serial": ""}
    put_row(connection, held_trust, {"uri": identity.uri}, values)


def send_trust(connection: Connection, certificate: IssuedCertificate, trust: str) -> None:
    """What its holder has stays on record until a call with this certificate comes."""
    values = {
        "sent_serial": certificate.entry.serial,
        "sent_authority": certificate.authority,
        "sent_trust": trust,
    }
    connection.execute(update(held_trust).where(held_trust.c.uri == certificate.entry.identity.uri).values(**values))


def register_certificate(connection: Connection, certificate: Certificate) -> None:
    """Its holder's own that ended long ago go: their dates alone keep them out, and renewals are many.

    Nobody else's: a clock that is far ahead for an hour, in which the coordinator renews its own, would shut out every
    silo.
    """
    long_ago = and_(
        certificates.c.uri == certificate.identity.uri,
        certificates.c.expires_at < certificate.issued_unix_s - EXPIRED_KEPT_S,
    )
    connection.execute(delete(certificates).where(long_ago))
    connection.execute(insert(certificates).values(certificate_row(certificate)))
