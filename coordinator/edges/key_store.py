"""The coordinator's keys and certificates on disk: its authority, its own TLS pair, its identity key, the operator's pair.

    keys/ca.key ca.pem              the federation's authority
    keys/tls.key tls.pem            what both listeners present
    keys/identity.key               Ed25519, signs round models
    keys/operator.key operator.pem  what the operator's commands on this host present

The folder is 0700, keys are 0600 and refused otherwise, encrypted where there is a passphrase (security/pki/key_file.py). The two certificates are issued again when a third of their
life is left, since the authority is at hand; a new TLS key goes with each.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.service.ports import IssuedCertificate
from security import files
from security.errors import ConfigurationError
from security.identifiers import FederationName, Identity, Role, SiloName
from security.pki import csr, endorsement, enrolment_token, identity_key, key_file
from security.pki.authority import Authority
from security.pki.parsing import parse_certificate
from security.pki.pins import spki_pin
from security.pki.tls_key import new_tls_key, tls_key_to_pem
from security.pki.trust_bundle import TrustBundle

OPERATOR_NAME = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsPair:
    key_pem: bytes
    certificate_pem: bytes

    @property
    def expires(self) -> datetime:
        return parse_certificate(self.certificate_pem).not_valid_after_utc


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyStore:
    """Loaded key material; the `Keys` port of the service."""

    folder: Path
    authority: Authority
    identity: Ed25519PrivateKey
    hosts: tuple[str, ...]
    enrolment_host: str
    enrolment_port: int
    silo_certificate_lifetime: timedelta
    own_certificate_lifetime: timedelta

    @staticmethod
    def create(folder: Path, federation: FederationName, now: datetime) -> None:
        """Make the authority and the identity key; refuses a folder that already holds one."""
        if (folder / "ca.key").exists():
            raise ConfigurationError(
                f"{folder} already holds an authority: choose another folder, or delete it yourself"
            )
        files.make_private_folder(folder)
        authority = Authority.create(federation, now=now)
        key_file.write_key(
            folder / "identity.key", identity_key.identity_key_to_pem(identity_key.new_identity_key()), os.environ
        )
        files.replace(folder / "ca.pem", authority.certificate_pem())
        key_file.write_key(folder / "ca.key", authority.key_pem(), os.environ)

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
        """Read the authority and the identity key; raises ConfigurationError naming the file at fault."""
        try:
            certificate_pem = (folder / "ca.pem").read_bytes()
        except OSError as error:
            raise ConfigurationError(
                f"{folder / 'ca.pem'} cannot be read: {error.strerror}; run coordinator init"
            ) from error
        return cls(
            folder=folder,
            authority=Authority.load(
                key_pem=key_file.read_key(folder / "ca.key", os.environ), certificate_pem=certificate_pem
            ),
            identity=identity_key.identity_key_from_pem(key_file.read_key(folder / "identity.key", os.environ)),
            hosts=tuple(hosts),
            enrolment_host=enrolment_host,
            enrolment_port=enrolment_port,
            silo_certificate_lifetime=silo_certificate_lifetime,
            own_certificate_lifetime=own_certificate_lifetime,
        )

    @property
    def federation(self) -> FederationName:
        return self.authority.federation

    @property
    def trust(self) -> TrustBundle:
        return TrustBundle((self.authority.certificate,))

    @property
    def trust_bundle_pem(self) -> bytes:
        return self.trust.to_pem()

    @property
    def identity_public_key(self) -> bytes:
        return identity_key.public_key_bytes(self.identity.public_key())

    def sign(self, domain: str, statement: bytes) -> bytes:
        return identity_key.sign(self.identity, domain=domain.encode(), payload=statement)

    def server_pair(self, now: datetime) -> TlsPair:
        """The coordinator's TLS key and certificate, issued anew when they are due or its host names changed."""
        return self._pair("tls", Identity(self.federation, Role.COORDINATOR), now, self.hosts)

    def operator_pair(self, now: datetime) -> TlsPair:
        """What the operator's commands on this host present."""
        return self._pair("operator", Identity(self.federation, Role.OPERATOR, OPERATOR_NAME), now, ())

    def _pair(self, stem: str, identity: Identity, now: datetime, hosts: Sequence[str]) -> TlsPair:
        key_path, certificate_path = self.folder / f"{stem}.key", self.folder / f"{stem}.pem"
        if key_path.exists() and certificate_path.exists():
            pair = TlsPair(
                key_pem=key_file.read_key(key_path, os.environ), certificate_pem=certificate_path.read_bytes()
            )
            certificate = parse_certificate(pair.certificate_pem)
            left = certificate.not_valid_after_utc - now
            if left > self.own_certificate_lifetime / 3 and self._names(certificate) >= set(hosts):
                return pair
        key = new_tls_key()
        certificate = self.authority.issue(
            key.public_key(), identity, now=now, lifetime=self.own_certificate_lifetime, hosts=hosts
        )
        pair = TlsPair(key_pem=tls_key_to_pem(key), certificate_pem=certificate.public_bytes(Encoding.PEM))
        # A crash between these two leaves a pair that does not fit; the certificate goes first out of the way.
        certificate_path.unlink(missing_ok=True)
        key_file.write_key(key_path, pair.key_pem, os.environ)
        files.replace(certificate_path, pair.certificate_pem)
        return pair

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
        identity = Identity(self.federation, Role.SILO, silo)
        public_key = csr.check_request(csr_der, identity)
        endorsement.check_endorsement(
            identity_public_key, request=csr_der, identity=identity, signature=identity_endorsement
        )
        certificate = self.authority.issue(
            public_key, identity, now=datetime.fromtimestamp(now, UTC), lifetime=self.silo_certificate_lifetime
        )
        return IssuedCertificate(
            pem=certificate.public_bytes(Encoding.PEM),
            serial=f"{certificate.serial_number:x}",
            expires_unix_s=certificate.not_valid_after_utc.timestamp(),
        )

    def token(self, silo: SiloName, *, secret: bytes, expires_unix_s: float) -> str:
        return enrolment_token.encode(
            enrolment_token.EnrolmentToken(
                federation=self.federation,
                silo=silo,
                ca_pin=spki_pin(self.authority.certificate),
                secret=secret,
                expires_at=int(expires_unix_s),
                host=self.enrolment_host,
                port=self.enrolment_port,
            )
        )
