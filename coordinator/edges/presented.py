"""What the listeners present and accept, changed while they run: gRPC asks at each handshake, and is told anew at each.

Connections that stand go on as they are; who connects next meets the new certificate and the new trust bundle. gRPC asks from
threads of its own, so what is presented is replaced whole.
"""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.edges.key_store import TlsPair
from security.pki.trust_bundle import TrustBundle

import grpc  # isort: skip  # after silo_wire, which leaves TLS 1.3 alone


@dataclass(frozen=True, slots=True)
class _Face:
    pair: TlsPair
    trust: TrustBundle

    def configuration(self, *, clients: bool) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(self.pair.key_pem, self.pair.certificate_pem)],
            root_certificates=self.trust.to_pem() if clients else None,
        )


class Presented:
    """The certificate that both listeners show, and the authorities whose certificates they take.

    `on_pair` and `on_trust` hear of others.
    """

    def __init__(self, pair: TlsPair, trust: TrustBundle) -> None:
        self._face = _Face(pair, trust)
        self.on_pair: list[Callable[[TlsPair], None]] = []
        self.on_trust: list[Callable[[TrustBundle], None]] = []

    @property
    def pair(self) -> TlsPair:
        return self._face.pair

    @property
    def trust(self) -> TrustBundle:
        return self._face.trust

    def show(self, pair: TlsPair, trust: TrustBundle) -> None:
        """From the next handshake on."""
        face, before = _Face(pair, trust), self._face
        if face != before:
            self._face = face
        if face.pair != before.pair:
            for shown in self.on_pair:
                shown(pair)
        if face.trust != before.trust:
            for told in self.on_trust:
                told(trust)

    def credentials(self, *, clients: bool) -> grpc.ServerCredentials:
        """For one start of one listener; `clients`: whether whoever connects has to show a certificate.

        Each handshake has a configuration of its own, hence a key of its own for session tickets: nobody's ticket opens a second
        connection. Whoever had stolen one would otherwise act as a silo without the silo's key, and gRPC has no switch for tickets.
        """

        def now() -> grpc.ServerCertificateConfiguration:
            return self._face.configuration(clients=clients)

        return grpc.dynamic_ssl_server_credentials(now(), now, clients)
