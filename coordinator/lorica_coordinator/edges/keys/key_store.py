"""The coordinator's keys and certificates on disk: its authorities, its own TLS pair, its identity key, the operator's
pair.

    keys/ca.key ca.pem ...      the federation's authorities (authorities.py)
    keys/server-pair.pem        key and certificate that both listeners present
    keys/identity.key           Ed25519, signs round models and trust bundles
    keys/operator-pair.pem      what the operator's commands on this host present

The folder is 0700, keys are 0600 and refused otherwise, encrypted where there is a passphrase
(security/lorica_security/host/key_file.py). The two pairs are issued again at two thirds of their life, since the
authority is at hand; a new TLS key goes with each. Key and certificate share a file, so that no crash parts them.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_coordinator.edges.keys.authorities import Authorities, require_none
from lorica_coordinator.service.issued import Certificate, IssuedCertificate, Trusted
from lorica_security.errors import ConfigurationError, MalformedMessage, StateError
from lorica_security.host import files, key_file
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity import endorsement, enrolment_token, identity_key
from lorica_security.pkcs11_keys.reference import identity_key_of, key_text
from lorica_security.pki import csr
from lorica_security.pki.authority import Authority
from lorica_security.pki.authority_succession import AuthoritySuccession, certificate_digest
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.pins import SpkiPin
from lorica_security.pki.profile import alternative_names, sole_identity
from lorica_security.pki.tls_key import TlsPublicKey, new_tls_key, tls_key_to_pem
from lorica_security.pki.trust_bundle import TrustBundle, directly_issued
from lorica_security.pki.validity import BACKDATING_MINUTES, Window

OPERATOR_NAME = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPair:
    key_pem: bytes
    certificate_pem: bytes

    @classmethod
    def from_pem(cls, pem: bytes) -> "TlsPair":
        """From what `pem` gave; raises MalformedMessage."""
        begin = pem.find(b"-----BEGIN CERTIFICATE-----")
        pair = cls(key_pem=pem[: max(begin, 0)], certificate_pem=pem[max(begin, 0) :])
        _ = pair.certificate
        return pair

    @property
    def pem(self) -> bytes:
        """Both, the key first: secret bytes, for a file of mode 0600."""
        return self.key_pem + self.certificate_pem

    @property
    def certificate(self) -> x509.Certificate:
        return parse_certificate(self.certificate_pem)

    @property
    def expires(self) -> datetime:
        return self.certificate.not_valid_after_utc

    @property
    def renewal_due(self) -> datetime:
        return Window.of(self.certificate).renewal_due

    def entry(self, now: datetime) -> Certificate:
        """As the register of certificates has it."""
        return register_entry(self.certificate, now)


def register_entry(certificate: x509.Certificate, now: datetime) -> Certificate:
    return Certificate(
        serial=f"{certificate.serial_number:x}",
        digest=certificate_digest(certificate).hex(),
        identity=sole_identity(alternative_names(certificate.extensions)),
        issued_unix_s=now.timestamp(),
        expires_unix_s=certificate.not_valid_after_utc.timestamp(),
    )


def key_files(folder: Path) -> list[Path]:
    """All that hold a private key."""
    return sorted((*folder.glob("*.key"), *folder.glob("*-pair.pem")))


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStore:
    """Loaded key material; the `Keys` port of the service."""

    folder: Path
    authorities: Authorities
    identity: Ed25519PrivateKey
    hosts: tuple[str, ...]
    enrolment_host: str
    enrolment_port: int
    silo_certificate_lifetime: timedelta
    own_certificate_lifetime: timedelta

    @staticmethod
    def create(
        folder: Path,
        federation: FederationName,
        now: datetime,
        *,
        authority_key: ec.EllipticCurvePrivateKey | None = None,
        own_key: Ed25519PrivateKey | None = None,
    ) -> None:
        """Make the authority and the identity key, of keys that lie in a token or of new ones; refuses a folder that
        already holds one."""
        require_none(folder)
        files.make_private_folder(folder)
        own_key = own_key or identity_key.new_identity_key()
        key_file.write_key(folder / "identity.key", key_text(own_key), os.environ)
        Authorities.create(folder, federation, now, authority_key)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        hosts: Sequence[str],
        enrolment_host: str,
        enrolment_port: int,
        silo_certificate_lifetime: timedelta,
        own_certificate_lifetime: timedelta,
    ) -> "KeyStore":
        """Read the authorities and the identity key; raises ConfigurationError naming the file at fault."""
        return cls(
            folder=folder,
            authorities=Authorities.load(folder),
            identity=identity_key_of(key_file.read_key(folder / "identity.key", os.environ), folder.parent),
            hosts=tuple(hosts),
            enrolment_host=enrolment_host,
            enrolment_port=enrolment_port,
            silo_certificate_lifetime=silo_certificate_lifetime,
            own_certificate_lifetime=own_certificate_lifetime,
        )

    @property
    def authority(self) -> Authority:
        """The one that issues."""
        return self.authorities.issuing

    @property
    def federation(self) -> FederationName:
        return self.authority.federation

    @property
    def trust(self) -> TrustBundle:
        return self.authorities.trust

    @property
    def trust_bundle_pem(self) -> bytes:
        return self.trust.to_pem()

    @property
    def trust_digest(self) -> bytes:
        return self.authorities.trust_digest

    @property
    def trusted(self) -> Trusted:
        trust, since = self.authorities.trusted
        return Trusted(pem=trust.to_pem(), digest=trust.digest, since=since)

    @property
    def trust_with_chains_pem(self) -> bytes:
        return self.authorities.with_chains

    @property
    def authority_successions(self) -> tuple[AuthoritySuccession, ...]:
        return self.authorities.successions

    @property
    def pin(self) -> str:
        return self.authorities.pin

    @property
    def identity_public_key(self) -> bytes:
        return identity_key.public_key_bytes(self.identity.public_key())

    def sign(self, domain: str, statement: bytes) -> bytes:
        return identity_key.sign(self.identity, domain=domain.encode(), payload=statement)

    def server_pair(self, now: datetime) -> TlsPair:
        """The coordinator's TLS key and certificate, issued anew when they are due, or its host names or authority
        changed, or the clock was ahead when they were issued."""
        pair = self._pair("server", Identity(self.federation, Role.COORDINATOR), now, self.hosts)
        self._keep("server", pair)
        return pair

    def operator_pair(self, now: datetime) -> TlsPair:
        """What the operator's commands on this host present."""
        pair = self.due_operator_pair(now)
        self.keep_operator_pair(pair)
        return pair

    def due_operator_pair(self, now: datetime) -> TlsPair:
        """The same before it is kept, where a command that runs at this moment would find it."""
        return self._pair("operator", Identity(self.federation, Role.OPERATOR, OPERATOR_NAME), now, ())

    def keep_operator_pair(self, pair: TlsPair) -> None:
        self._keep("operator", pair)

    def present_operator_pair(self) -> TlsPair:
        """As the coordinator that runs here made it; raises StateError when it has made none."""
        path = self.folder / "operator-pair.pem"
        if not path.exists():
            raise StateError(f"{path} is not there yet: the coordinator makes it as it starts")
        return self._read_pair(path)

    def _pair(self, stem: str, identity: Identity, now: datetime, hosts: Sequence[str]) -> TlsPair:
        path = self.folder / f"{stem}-pair.pem"
        if path.exists():
            pair = self._read_pair(path)
            if Window.of(pair.certificate).begin <= now < pair.renewal_due and self._serves(pair.certificate, hosts):
                return pair
        key = new_tls_key()
        certificate = self.authority.issue(
            key.public_key(), identity, now=now, lifetime=self.own_certificate_lifetime, hosts=hosts
        )
        return TlsPair(key_pem=tls_key_to_pem(key), certificate_pem=certificate.public_bytes(Encoding.PEM))

    def _keep(self, stem: str, pair: TlsPair) -> None:
        path = self.folder / f"{stem}-pair.pem"
        if not path.exists() or self._read_pair(path) != pair:
            key_file.write_key(path, pair.pem, os.environ)

    @staticmethod
    def _read_pair(path: Path) -> TlsPair:
        try:
            return TlsPair.from_pem(key_file.read_key(path, os.environ))
        except MalformedMessage as error:
            raise ConfigurationError(f"{path}: {error}; delete it, another one is made") from error

    def _serves(self, certificate: x509.Certificate, hosts: Sequence[str]) -> bool:
        """Whether the authority that issues now made it, for all of its host names, and for no longer than is set."""
        window = Window.of(certificate)
        return (
            directly_issued(certificate, by=self.authority.certificate)
            and self._names(certificate) >= set(hosts)
            and window.end - window.begin <= self.own_certificate_lifetime + timedelta(minutes=BACKDATING_MINUTES)
        )

    @staticmethod
    def _names(certificate: x509.Certificate) -> set[str]:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return {
            *names.get_values_for_type(x509.DNSName),
            *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
        }

    def certify(
        self, silo: SiloName, *, csr_der: bytes, identity_public_key: bytes, identity_endorsement: bytes, now: float
    ) -> IssuedCertificate:
        """A silo certificate for a request that is this silo's, and endorsed by the identity key that comes with it."""
        check = partial(endorsement.check_endorsement, identity_public_key, signature=identity_endorsement)
        return self._certified(silo, csr_der, now, check)

    def recertify(
        self, silo: SiloName, *, csr_der: bytes, identity_public_key: bytes, identity_endorsement: bytes, now: float
    ) -> IssuedCertificate:
        """A new silo certificate for a request that the pinned identity key endorses as a renewal."""
        pinned = identity_key.public_key_from_bytes(identity_public_key)
        check = partial(endorsement.check_renewal, pinned, signature=identity_endorsement)
        return self._certified(silo, csr_der, now, check)

    def grant(self, identity: Identity, *, csr_der: bytes, valid_s: float, now: float) -> IssuedCertificate:
        """A certificate for an operator or viewer on another host, who made the key."""
        return self._issued(csr.check_request(csr_der, identity), identity, now, timedelta(seconds=valid_s))

    def _certified(self, silo: SiloName, csr_der: bytes, now: float, check: Callable[..., object]) -> IssuedCertificate:
        """`check` is how the silo's identity key has to stand behind the request."""
        identity = Identity(self.federation, Role.SILO, silo)
        public_key = csr.check_request(csr_der, identity)
        check(request=csr_der, identity=identity)
        return self._issued(public_key, identity, now, self.silo_certificate_lifetime)

    def _issued(
        self, public_key: TlsPublicKey, identity: Identity, now: float, lifetime: timedelta
    ) -> IssuedCertificate:
        at, authority = datetime.fromtimestamp(now, UTC), self.authority
        certificate = authority.issue(public_key, identity, now=at, lifetime=lifetime)
        return IssuedCertificate(
            pem=certificate.public_bytes(Encoding.PEM),
            entry=register_entry(certificate, at),
            authority=certificate_digest(authority.certificate).hex(),
        )

    def token(self, silo: SiloName, *, secret: bytes, expires_unix_s: float, pin: str) -> str:
        return enrolment_token.encode(
            enrolment_token.EnrolmentToken(
                federation=self.federation,
                silo=silo,
                ca_pin=SpkiPin(pin),
                secret=secret,
                expires_at=int(expires_unix_s),
                host=self.enrolment_host,
                port=self.enrolment_port,
            )
        )
