"""What the listeners present and accept, changed while they run: gRPC asks at each handshake whether it has changed.

Connections that stand go on as they are; who connects next meets the new certificate and the new trust bundle. gRPC
asks from threads of its own, one after the other, so what is presented is replaced whole.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from lorica_coordinator.edges.keys.key_store import TlsPair
from lorica_security.pki.trust_bundle import TrustBundle
from silo_wire.tls import require_tls_1_3

BEFORE_A_CHANGE_S: Final = 1.0
"""gRPC frees what it presented before while another thread's handshake may be about to take hold of it, and the process
dies (https://github.com/grpc/grpc/issues/36693). That thread needs microseconds after it has asked, and no other can
ask while one waits: so whoever meets a change waits first. Changes are renewals, some a year; a handshake at one takes
a second longer."""


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
        """For one start of one listener; `clients`: whether whoever connects has to show a certificate."""
        shown = self._face

        def changed() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            if (face := self._face) is shown:
                return None
            time.sleep(BEFORE_A_CHANGE_S)
            shown = face
            return face.configuration(clients=clients)

        require_tls_1_3()
        first = shown.configuration(clients=clients)
        return grpc.dynamic_ssl_server_credentials(first, changed, clients)  # type: ignore[arg-type]  # None: as before
