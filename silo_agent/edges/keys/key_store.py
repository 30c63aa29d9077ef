"""The silo's keys and what it learnt at enrolment and since. Private keys are made here and never leave this folder.

All of it is stored only after the coordinator's answer was verified, so a failed enrolment leaves nothing behind. A
renewal replaces one file, which holds the TLS key, its certificate and the trust bundle: whatever a crash interrupts,
they fit.
"""

import json
import os
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_security.errors import ConfigurationError, LoricaError, MalformedMessage, StateError
from lorica_security.host.files import (
    erase,
    is_there,
    make_private_folder,
    mark,
    read_private,
    was_erased,
    write_private,
)
from lorica_security.host.key_file import passphrase_of, read_key, write_key
from lorica_security.identifiers import FederationName, Identity, Role, SiloName, federation_name, silo_name
from lorica_security.identity.identity_key import public_key_bytes, public_key_from_bytes
from lorica_security.pkcs11_keys.reference import identity_key_of, key_text, tls_key_of
from lorica_security.pkcs11_keys.token_session import TokenUnusable
from lorica_security.pki.hosts import parse_host
from lorica_security.pki.parsing import parse_certificates
from lorica_security.pki.tls_key import TlsPrivateKey, tls_key_to_pem
from lorica_security.pki.trust_bundle import TrustBundle
from silo_agent.edges.disk.silo_folder import SiloFolder

_SINCE = b"Trusted-Since: "


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloCredentials:
    """Who this silo is, how it proves it, and whom it believes. `address` is host:port of the coordinator.

    `trusted_since`: when `trust` took the place of the bundle before, by the coordinator's signed word; 0 until it has
    given it.
    """

    federation: FederationName
    silo: SiloName
    address: str
    identity_key: Ed25519PrivateKey = field(repr=False)
    tls_key: TlsPrivateKey = field(repr=False)
    certificate: x509.Certificate
    trust: TrustBundle
    coordinator_key: Ed25519PublicKey
    trusted_since: int = 0

    @property
    def identity(self) -> Identity:
        return Identity(self.federation, Role.SILO, self.silo)

    @property
    def tls_key_pem(self) -> bytes:
        """Raises ConfigurationError for a key that lies in a token."""
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
    """Raises StateError where a silo's keys already are, ConfigurationError for a passphrase that could not protect new
    ones.

    Keys of an enrolment that was cut off are erased: its token is spent, and the coordinator takes another silo's keys
    with the next one.
    """
    passphrase_of(os.environ)  # found out before a token is spent
    if folder.begun.exists() and not any(path.exists() for path in (folder.enrolment, folder.audit, folder.journal)):
        # A kill cut it off: its keys are nobody's. Had it ended, what follows would be there as well, whatever became
        # of enrolment.json.
        erase(folder.identity_key)
        erase(folder.tls)
        folder.begun.unlink()
    for path in (folder.enrolment, folder.identity_key, folder.tls):
        if path.exists():
            raise StateError(
                f"{folder.root} already holds a silo ({path.name}): "
                "enrol another one into a folder of its own with --dir, or remove this folder first"
            )


def store_credentials(folder: SiloFolder, credentials: SiloCredentials) -> None:
    """Write everything, `enrolment.json` last; raises StateError when the folder is taken, StorageError."""
    refuse_second_enrolment(folder)
    make_private_folder(folder.root)
    mark(folder.begun)
    write_key(folder.identity_key, key_text(credentials.identity_key), os.environ)
    store_tls(folder, credentials)
    facts = {
        "version": 1,
        "federation": credentials.federation,
        "silo": credentials.silo,
        "address": credentials.address,
        "coordinator_identity_key": public_key_bytes(credentials.coordinator_key).hex(),
    }
    write_private(folder.enrolment, json.dumps(facts, indent=1).encode() + b"\n")
    folder.begun.unlink()


def store_tls(folder: SiloFolder, credentials: SiloCredentials) -> None:
    """Replace TLS key, certificate and trust bundle, all at once; raises StorageError."""
    since = b"%s%d\n" % (_SINCE, credentials.trusted_since)  # PEM takes words between its blocks
    pem = key_text(credentials.tls_key) + credentials.certificate_pem + since + credentials.trust.to_pem()
    write_key(folder.tls, pem, os.environ)


def load_credentials(folder: SiloFolder) -> SiloCredentials:
    """Everything, checked; raises ConfigurationError naming the file, also when others can read one of them."""
    folder.require_enrolled()
    make_private_folder(folder.root)
    federation, silo, address, coordinator_key = _facts(folder)
    identity_key = identity_key_of(read_key(folder.identity_key, os.environ), folder.root)
    tls_key, certificate, trust, trusted_since = _tls(folder)
    return SiloCredentials(
        federation=federation,
        silo=silo,
        address=address,
        identity_key=identity_key,
        tls_key=tls_key,
        certificate=certificate,
        trust=trust,
        coordinator_key=coordinator_key,
        trusted_since=trusted_since,
    )


def succession_is_finished(folder: SiloFolder) -> bool:
    """Whether the successor that is there is the present key, or was overwritten already."""
    if was_erased(folder.next_identity_key):
        return True
    return read_key(folder.next_identity_key, os.environ) == read_key(folder.identity_key, os.environ)


def check_settled(folder: SiloFolder) -> None:
    """Raise StateError while a succession of the identity key is not finished: what is sealed may have the seal of
    either key."""
    if is_there(folder.next_identity_key) and not succession_is_finished(folder):
        raise StateError(
            f"{folder.next_identity_key} is there: a rotation of the identity key was begun and not finished; "
            "`silo-agent start` finishes it, and so does `silo-agent identity rotate`"
        )


def enrolled_as(folder: SiloFolder) -> Identity:
    """Whose folder it is; no key is opened. Raises ConfigurationError naming the file."""
    federation, silo, *_ = _facts(folder)
    return Identity(federation, Role.SILO, silo)


def _tls(folder: SiloFolder) -> tuple[TlsPrivateKey, x509.Certificate, TrustBundle, int]:
    pem = read_key(folder.tls, os.environ)
    begin = max(pem.find(b"-----BEGIN CERTIFICATE-----"), 0)
    try:
        tls_key = tls_key_of(pem[:begin], folder.root)
        certificate, *authorities = parse_certificates(pem[begin:])
        trust = TrustBundle(tuple(authorities))
        since = next(int(line.removeprefix(_SINCE)) for line in pem[begin:].splitlines() if line.startswith(_SINCE))
    except TokenUnusable:
        raise
    except ConfigurationError as error:
        raise ConfigurationError(f"{folder.tls}: {error}") from error
    except StopIteration:
        raise ConfigurationError(f"{folder.tls} does not say since when: restore the file or enrol again") from None
    except (MalformedMessage, ValueError) as error:
        raise ConfigurationError(f"{folder.tls}: {error}; restore the file or enrol again") from error
    if certificate.public_key() != tls_key.public_key():
        raise ConfigurationError(f"{folder.tls} has a certificate for another key: restore the file or enrol again")
    return tls_key, certificate, trust, since


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
