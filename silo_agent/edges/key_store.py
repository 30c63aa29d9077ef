"""The silo's keys and what it learnt at enrolment. Private keys are made here and never leave this folder.

All of it is stored only after the coordinator's answer was verified, so a failed enrolment leaves nothing behind, and
nothing that is there is ever overwritten.
"""

import json
import os
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from security.errors import ConfigurationError, LoricaError, MalformedMessage, StateError
from security.files import make_private_folder, read_private, write_private
from security.identifiers import FederationName, Identity, Role, SiloName, federation_name, silo_name
from security.pki.hosts import parse_host
from security.pki.identity_key import (
    identity_key_from_pem,
    identity_key_to_pem,
    public_key_bytes,
    public_key_from_bytes,
)
from security.pki.key_file import passphrase_of, read_key, write_key
from security.pki.parsing import parse_certificate
from security.pki.tls_key import TlsPrivateKey, tls_key_from_pem, tls_key_to_pem
from security.pki.trust_bundle import TrustBundle
from silo_agent.edges.silo_folder import SiloFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloCredentials:
    """Who this silo is, how it proves it, and whom it believes. `address` is host:port of the coordinator."""

    federation: FederationName
    silo: SiloName
    address: str
    identity_key: Ed25519PrivateKey = field(repr=False)
    tls_key: TlsPrivateKey = field(repr=False)
    certificate: x509.Certificate
    trust: TrustBundle
    coordinator_key: Ed25519PublicKey

    @property
    def identity(self) -> Identity:
        return Identity(self.federation, Role.SILO, self.silo)

    @property
    def tls_key_pem(self) -> bytes:
        return tls_key_to_pem(self.tls_key)

    @property
    def certificate_pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)


def split_address(text: str) -> tuple[str, int]:
    """host and port of `host:port` or `[IPv6]:port`; raises MalformedMessage."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    try:
        parse_host(host)
    except ConfigurationError as error:
        raise MalformedMessage(f"address {text[:300]!r} of the coordinator: {error}") from error
    if not colon or not port.isascii() or not port.isdigit() or not 1 <= int(port[:6]) <= 65535:
        raise MalformedMessage(f"address {text[:300]!r} of the coordinator is not host:port")
    return host, int(port)


def refuse_second_enrolment(folder: SiloFolder) -> None:
    """Raises StateError where a silo's keys already are, ConfigurationError for a passphrase that could not protect new ones."""
    passphrase_of(os.environ)  # found out before a token is spent
    for path in (folder.enrolment, folder.identity_key, folder.tls_key, folder.certificate):
        if path.exists():
            raise StateError(
                f"{folder.root} already holds a silo ({path.name}): "
                "enrol another one into a folder of its own with --dir, or remove this folder first"
            )


def store_credentials(folder: SiloFolder, credentials: SiloCredentials) -> None:
    """Write everything, `enrolment.json` last; raises StateError when the folder is taken, StorageError."""
    refuse_second_enrolment(folder)
    make_private_folder(folder.root)
    write_key(folder.identity_key, identity_key_to_pem(credentials.identity_key), os.environ)
    write_key(folder.tls_key, credentials.tls_key_pem, os.environ)
    write_private(folder.trust_bundle, credentials.trust.to_pem())
    write_private(folder.certificate, credentials.certificate_pem)
    facts = {
        "version": 1,
        "federation": credentials.federation,
        "silo": credentials.silo,
        "address": credentials.address,
        "coordinator_identity_key": public_key_bytes(credentials.coordinator_key).hex(),
    }
    write_private(folder.enrolment, json.dumps(facts, indent=1).encode() + b"\n")


def load_credentials(folder: SiloFolder) -> SiloCredentials:
    """Everything, checked; raises ConfigurationError naming the file, also when others can read one of them."""
    folder.require_enrolled()
    make_private_folder(folder.root)
    federation, silo, address, coordinator_key = _facts(folder)
    tls_key = tls_key_from_pem(read_key(folder.tls_key, os.environ))
    identity_key = identity_key_from_pem(read_key(folder.identity_key, os.environ))
    try:
        certificate = parse_certificate(read_private(folder.certificate))
        trust = TrustBundle.from_pem(read_private(folder.trust_bundle))
    except MalformedMessage as error:
        raise ConfigurationError(f"{folder.root}: {error}; restore the file or enrol again") from error
    if certificate.public_key() != tls_key.public_key():
        raise ConfigurationError(
            f"{folder.certificate} is not for the key in {folder.tls_key.name}: restore both from one backup"
        )
    return SiloCredentials(
        federation=federation,
        silo=silo,
        address=address,
        identity_key=identity_key,
        tls_key=tls_key,
        certificate=certificate,
        trust=trust,
        coordinator_key=coordinator_key,
    )


def _facts(folder: SiloFolder) -> tuple[FederationName, SiloName, str, Ed25519PublicKey]:
    raw = read_private(folder.enrolment)
    try:
        facts = json.loads(raw)
        if facts["version"] != 1:
            raise ConfigurationError(f"{folder.enrolment} has version {facts['version']}: update the agent")
        split_address(facts["address"])
        return (
            federation_name(facts["federation"]),
            silo_name(facts["silo"]),
            facts["address"],
            public_key_from_bytes(bytes.fromhex(facts["coordinator_identity_key"])),
        )
    except LoricaError as error:
        raise ConfigurationError(f"{folder.enrolment}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{folder.enrolment} does not parse ({error!r}): restore it from backup or enrol again"
        ) from error
