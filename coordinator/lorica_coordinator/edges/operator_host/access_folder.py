"""An operator's or viewer's folder on another host: its key, made there, and what the coordinator granted for it.

    access.key       the TLS key; it never leaves this folder
    access.next.key  another one, while the certificate is renewed
    access.csr       the request, as `coordinator access grant` takes it
    access.json      what was granted: address, certificate, trust bundle; with it, commands reach the coordinator

What is granted says whom to trust, so it travels by a way on which nobody can change it, as an enrolment token does.
"""

import json
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from pydantic import Field

from lorica_coordinator.edges.keys.key_store import TlsPair
from lorica_coordinator.edges.operator_host.operator_client import OperatorAccess
from lorica_security.console.strict_toml import Section
from lorica_security.daemon.listen_address import address
from lorica_security.errors import AuthenticationError, ConfigurationError, MalformedMessage, StateError
from lorica_security.host import files, key_file
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.parsing import parse_certificate, parse_request
from lorica_security.pki.peer import identify_client
from lorica_security.pki.profile import alternative_names, sole_identity
from lorica_security.pki.tls_key import new_tls_key, tls_key_from_pem, tls_key_to_pem
from lorica_security.pki.trust_bundle import TrustBundle

if TYPE_CHECKING:
    from silo_wire.codecs.renewal import RenewalAnswer
    from silo_wire.v1 import operator_pb2

ACCESS_FILE = "access.json"
HELD_BY = (Role.OPERATOR, Role.VIEWER)


def access_role(text: str) -> Role:
    """Raises ConfigurationError for a role that is not given access from other hosts."""
    for role in HELD_BY:
        if role.value == text:
            return role
    raise ConfigurationError(f"role {text!r} is none of {', '.join(role.value for role in HELD_BY)}")


class _Granted(Section):
    version: Literal[1] = 1
    identity: str
    address: str
    certificate: Annotated[str, Field(min_length=1)]
    trust: Annotated[str, Field(min_length=1)]
    trusted_since: Annotated[int, Field(ge=0)] = 0
    coordinator_identity_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class AccessFolder:
    root: Path

    @property
    def granted(self) -> Path:
        return self.root / ACCESS_FILE

    @property
    def key(self) -> Path:
        return self.root / "access.key"

    @property
    def next_key(self) -> Path:
        return self.root / "access.next.key"

    @property
    def request(self) -> Path:
        return self.root / "access.csr"

    @property
    def coordinator_key(self) -> Ed25519PublicKey:
        """As it was granted; raises ConfigurationError naming the file."""
        return public_key_from_bytes(bytes.fromhex(self._read().coordinator_identity_key))

    def ask(self, identity: Identity) -> bytes:
        """A new key, and the request for its certificate, PEM. Raises StateError where access was granted already."""
        if self.granted.exists():
            raise StateError(f"{self.root} holds access that was granted: choose another folder, or remove this one")
        files.make_private_folder(self.root)
        key = new_tls_key()
        key_file.write_key(self.key, tls_key_to_pem(key), os.environ)
        pem = x509.load_der_x509_csr(certificate_request(key, identity)).public_bytes(Encoding.PEM)
        files.replace(self.request, pem)
        return pem

    def accept(self, granted: str, *, now: datetime) -> Identity:
        """Take up what `coordinator access grant` printed; raises ConfigurationError unless it is for the key that is
        here."""
        if not self.key.exists():
            raise StateError(f"{self.root} holds no request: begin with `coordinator access request`")
        _, identity = _checked(_parsed(granted, "what was granted"), key_file.read_key(self.key, os.environ), now)
        files.write_private(self.granted, granted.encode())
        return identity

    def load(self, *, now: datetime) -> OperatorAccess:
        """Raises ConfigurationError naming the file, AuthenticationError for a certificate that has expired."""
        access, _ = _checked(self._read(), self._own_key(), now)
        return access

    def begin_renewal(self) -> bytes:
        """A new key beside the present one, and the request for its certificate, DER."""
        identity = Identity.from_uri(self._read().identity)
        key_file.write_key(self.key, self._own_key(), os.environ)  # where the last renewal was cut off before it did
        key = new_tls_key()
        key_file.write_key(self.next_key, tls_key_to_pem(key), os.environ)
        return certificate_request(key, identity)

    def renew(self, answer: "RenewalAnswer", *, now: datetime) -> OperatorAccess:
        """Take up what the coordinator answered; a crash leaves the access before or this one.

        Raises IntegrityError for a trust bundle that the coordinator did not sign, or that is older than the one that
        is held, ConfigurationError, AuthenticationError for a certificate that is not for the new key or another's.
        """
        held = self._read()
        identity = Identity.from_uri(held.identity)
        trust = answer.check_trust(
            self.coordinator_key,
            federation=identity.federation,
            held_since=held.trusted_since,
        )
        fields = {
            "certificate": answer.certificate_pem.decode(errors="replace"),
            "trust": trust.to_pem().decode(),
            "trusted_since": answer.since,
        }
        renewed, key = held.model_copy(update=fields), key_file.read_key(self.next_key, os.environ)
        access, _ = _checked(renewed, key, now)
        files.write_private(self.granted, _text(renewed).encode())
        key_file.write_key(self.key, key, os.environ)
        self.next_key.unlink()
        return access

    def _read(self) -> _Granted:
        text = files.read_private(self.granted).decode(errors="replace")
        return _parsed(text, str(self.granted))

    def _own_key(self) -> bytes:
        """The key of the certificate that is here: the next one where a renewal was cut off as it ended."""
        pem = key_file.read_key(self.key, os.environ)
        if self.next_key.exists():
            following = key_file.read_key(self.next_key, os.environ)
            certificate = parse_certificate(self._read().certificate.encode())
            if certificate.public_key() == tls_key_from_pem(following).public_key():
                return following
        return pem


def granted_text(identity: Identity, reply: "operator_pb2.GrantAccessReply") -> str:
    """What `coordinator access grant` prints. Nothing in it is secret."""
    granted = _Granted(
        identity=identity.uri,
        address=reply.address,
        certificate=reply.certificate_pem.decode(),
        trust=reply.trust_bundle_pem.decode(),
        coordinator_identity_key=reply.coordinator_identity_key.hex(),
    )
    return _text(granted)


def _text(granted: _Granted) -> str:
    return granted.model_dump_json(indent=1) + "\n"


def requested_identity(request: bytes) -> Identity:
    """Whom a request is for; raises MalformedMessage. Nothing in it is proven yet."""
    return sole_identity(alternative_names(parse_request(request).extensions))


def _parsed(text: str, where: str) -> _Granted:
    try:
        return _Granted.model_validate(json.loads(text))
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigurationError(f"{where} is not what coordinator access grant printed: {reason}") from error


def _checked(granted: _Granted, key_pem: bytes, now: datetime) -> tuple[OperatorAccess, Identity]:
    try:
        wanted = Identity.from_uri(granted.identity)
        trust = TrustBundle.from_pem(granted.trust.encode())
        certificate = parse_certificate(granted.certificate.encode())
        identity = identify_client(granted.certificate.encode(), trust=trust, now=now, federation=wanted.federation)
        address(granted.address)
    except (MalformedMessage, ValueError) as error:
        raise ConfigurationError(f"what was granted cannot be used: {error}") from error
    if identity != wanted or identity.role not in HELD_BY:
        raise AuthenticationError(f"the certificate that was granted is of {identity.uri}, not of {wanted.uri}")
    if certificate.public_key() != tls_key_from_pem(key_pem).public_key():
        raise ConfigurationError(
            "the certificate that was granted is for another key: grant the request of this folder"
        )
    pair = TlsPair(key_pem=key_pem, certificate_pem=granted.certificate.encode())
    access = OperatorAccess(address=granted.address, federation=wanted.federation, pair=pair, trust=trust, remote=True)
    return access, identity
