"""The certificate that this silo connects with: how it is renewed, checked and kept."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

from cryptography import x509

from lorica_security.errors import AuthenticationError, IntegrityError
from lorica_security.identity.endorsement import endorse_renewal
from lorica_security.pkcs11_keys.reference import in_token
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import identify_client
from lorica_security.pki.tls_key import TlsPrivateKey, new_tls_key
from lorica_security.pki.validity import Window
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, store_tls
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_wire.codecs.renewal import RenewalAnswer


class SiloCertificate:
    """`CertificatePort` of the folder of an agent that runs."""

    def __init__(
        self,
        folder: SiloFolder,
        credentials: SiloCredentials,
        coordinator: GrpcCoordinator,
        *,
        on_renewed: Callable[[x509.Certificate], None] = lambda certificate: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`on_renewed` hears of each new certificate, once it is kept."""
        self._on_renewed = on_renewed
        self._folder = folder
        self._credentials = credentials
        self._coordinator = coordinator
        self._now = now

    @property
    def due_unix_s(self) -> float:
        return Window.of(self._credentials.certificate).renewal_due.timestamp()

    @property
    def expires_unix_s(self) -> float:
        return Window.of(self._credentials.certificate).end.timestamp()

    @property
    def trust_digest(self) -> bytes:
        return self._credentials.trust.digest

    async def renew(self) -> None:
        """Checks before it keeps, keeps before it connects. The key before stays good until its certificate ends.

        A key that lies in a token stays: who made it there makes its successor.
        """
        who = self._credentials
        key = who.tls_key if in_token(who.tls_key) else new_tls_key()
        request = certificate_request(key, who.identity)
        endorsement = endorse_renewal(who.identity_key, request=request, identity=who.identity)
        answer = await self._coordinator.renew_certificate(request, endorsement)
        renewed = checked(who, key, answer, now=self._now())
        store_tls(self._folder, renewed)
        self._credentials = renewed
        self._on_renewed(renewed.certificate)
        self._coordinator.go_over(mutual_channel(renewed), renewed)


def checked(who: SiloCredentials, key: TlsPrivateKey, answer: RenewalAnswer, *, now: datetime) -> SiloCredentials:
    """The credentials after a renewal.

    Raises IntegrityError for a trust bundle that the pinned coordinator did not sign, or that is older than the one
    that is held, or a certificate for another key; AuthenticationError for one that is not this silo's, valid now.
    """
    trust = answer.check_trust(who.coordinator_key, federation=who.federation, held_since=who.trusted_since)
    certificate = parse_certificate(answer.certificate_pem)
    identity = identify_client(answer.certificate_pem, trust=trust, now=now, federation=who.federation)
    if identity != who.identity:
        raise AuthenticationError(
            f"the coordinator renewed the certificate of {identity.uri}, not of {who.identity.uri}"
        )
    if certificate.public_key() != key.public_key():
        raise IntegrityError("the coordinator renewed the certificate for another key than this silo's: refuse it")
    return replace(who, tls_key=key, certificate=certificate, trust=trust, trusted_since=answer.since)
