"""Whose request is answered.

On loopback: whoever is on this host, in plain HTTP, if the Host header names this host. A page of somebody else's name
that has been pointed at 127.0.0.1 would otherwise read this one through the operator's own browser (DNS rebinding). On
any other address: TLS 1.3, and a certificate of an operator or viewer that the register knows, or the token of a file.
"""

import base64
import binascii
import hmac
import os
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from lorica_coordinator.edges.keys.key_store import TlsPair
from lorica_coordinator.edges.server.authorisation import authorise
from lorica_coordinator.edges.server.presented import Presented
from lorica_security.daemon.http_hosts import LOOPBACK_NAMES, require_host
from lorica_security.daemon.http_server import Request
from lorica_security.errors import AuthenticationError, ConfigurationError
from lorica_security.host import files
from lorica_security.identifiers import FederationName, Identity
from lorica_security.pki.authority_succession import certificate_digest
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import identify_client
from lorica_security.pki.trust_bundle import TrustBundle

LEAST_TOKEN: Final = 32
MOST_TOKEN: Final = 1024
_LIKE: Final = "/silo_wire.v1.Operator/GetStatus"  # who may call this, may look here


def read_token(path: Path) -> bytes:
    """The token in a file of mode 0600; raises ConfigurationError naming it."""
    token = files.read_private(path).strip()
    if not LEAST_TOKEN <= len(token) <= MOST_TOKEN or not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigurationError(
            f"{path} does not hold a token of {LEAST_TOKEN} to {MOST_TOKEN} printable characters without spaces: "
            "make one with openssl rand -hex 32"
        )
    return token


@dataclass(frozen=True, slots=True, kw_only=True)
class OnLoopback:
    """No TLS, nobody is asked who they are."""

    def require(self, request: Request) -> None:
        """Raises AnotherHost."""
        require_host(request.host, LOOPBACK_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class BehindTls:
    """`hosts` are those of the coordinator's certificate; `registered` raises unless a certificate is let in; `token`
    may be None."""

    federation: FederationName
    trust: Callable[[], TrustBundle]
    registered: Callable[[Identity, str, str], None]
    hosts: Collection[str]
    token: bytes | None

    def require(self, request: Request) -> None:
        """Raises AnotherHost, AuthenticationError, or AuthorisationError for who is known and may not look."""
        require_host(request.host, self.hosts)
        if request.certificate is not None:
            self._require_certificate(request.certificate)
        elif self.token is None:
            raise AuthenticationError("no client certificate was shown: use that of an operator or viewer")
        elif not hmac.compare_digest(_token_of(request.authorization), self.token):
            raise AuthenticationError("the token is not the one of this page")

    def _require_certificate(self, der: bytes) -> None:
        identity = identify_client(der, trust=self.trust(), now=datetime.now(UTC), federation=self.federation)
        certificate = parse_certificate(der)
        self.registered(identity, f"{certificate.serial_number:x}", certificate_digest(certificate).hex())
        authorise(identity, _LIKE)


Entrance = OnLoopback | BehindTls


def tls_context(presented: Presented, *, token: bool) -> ssl.SSLContext:
    """TLS 1.3 with the coordinator's certificate, kept up with `presented`; with a `token` certificates may be left
    out.

    An authority that was retired since stays among its roots: who may look is held against the bundle of the moment, at
    each request.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_OPTIONAL if token else ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an institution's own root may stand above the authority
    context.num_tickets = 0  # a resumed session would show no certificate
    context.options |= ssl.OP_NO_TICKET
    _show(context, presented.pair)
    _trust(context, presented.trust)
    presented.on_pair.append(lambda pair: _show(context, pair))
    presented.on_trust.append(lambda trust: _trust(context, trust))
    return context


def _show(context: ssl.SSLContext, pair: TlsPair) -> None:
    """Python's TLS reads keys from files alone: this one is in memory and has no name."""
    descriptor = os.memfd_create("status-page", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(pair.pem)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


def _trust(context: ssl.SSLContext, trust: TrustBundle) -> None:
    context.load_verify_locations(cadata=trust.to_pem().decode())


def _token_of(authorization: str) -> bytes:
    """What stands behind Bearer; or the password of Basic, which a browser asks a person for. b"" for neither."""
    scheme, _, value = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip().encode("latin-1")
        case "basic":
            try:
                return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return b""
    return b""
