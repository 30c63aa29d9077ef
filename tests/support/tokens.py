"""Enrolment tokens for tests, as `coordinator invite` makes them."""

import secrets
from datetime import datetime, timedelta

from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.enrolment_token import SECRET_BYTES, EnrolmentToken
from lorica_security.pki.pins import SpkiPin


def mint(
    *,
    federation: FederationName,
    silo: SiloName,
    ca_pin: SpkiPin,
    host: str,
    port: int,
    now: datetime,
    lifetime: timedelta = timedelta(hours=72),
    secret: bytes | None = None,
) -> EnrolmentToken:
    """A token that expires `lifetime` after `now`; its secret is a fresh one unless it is given."""
    return EnrolmentToken(
        federation=federation,
        silo=silo,
        ca_pin=ca_pin,
        secret=secrets.token_bytes(SECRET_BYTES) if secret is None else secret,
        expires_at=int((now + lifetime).timestamp()),
        host=host,
        port=port,
    )
