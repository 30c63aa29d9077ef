"""Certificates and authorities as values: what was issued, what stands, what is trusted."""

from dataclasses import dataclass

from lorica_security.identifiers import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """One that was issued. Both in hexadecimal: `serial` without leading zeros, `digest` the SHA-256 of its DER."""

    serial: str
    digest: str
    identity: Identity
    issued_unix_s: float
    expires_unix_s: float
    revoked_unix_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCertificate:
    """`authority`: hexadecimal SHA-256 of the certificate of the one that issued it."""

    pem: bytes
    entry: Certificate
    authority: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthorityStanding:
    """One of the federation's authorities. `stage`: issuing, successor, trusted.

    `digest`: hexadecimal SHA-256 of its certificate; `pin`: what tokens have of it.
    """

    name: str
    stage: str
    subject: str
    pin: str
    digest: str
    begins_unix_s: float
    expires_unix_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """A trust bundle, its digest of 32 bytes, and since when it stands: Unix seconds, more with each bundle."""

    pem: bytes
    digest: bytes
    since: int
