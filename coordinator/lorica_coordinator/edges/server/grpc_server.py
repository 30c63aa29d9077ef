"""The coordinator's listeners: one mutually authenticated for silos and operators, one for enrolment.

gRPC either requires a client certificate or never asks for one, hence two ports. The enrolment port listens only while
an invitation is open. What both present, and whose certificates are taken, may change while they run (presented.py).
"""

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable

import grpc
import grpc.aio

from lorica_coordinator.edges.server.federation_servicer import FederationServicer
from lorica_coordinator.edges.server.gate import OF_ALL_STRANGERS, OF_ONE_CALLER, Gate, Refusal, anyone, by_certificate
from lorica_coordinator.edges.server.presented import Presented
from lorica_coordinator.service.members.enrolment import Enrolment
from lorica_coordinator.service.members.held_trust import HeldTrusts
from lorica_coordinator.service.members.register import Register
from lorica_coordinator.settings import reachable
from lorica_security.daemon.listen_address import address, require_bindable
from lorica_security.errors import ConfigurationError, StateError
from lorica_security.identifiers import FederationName
from silo_wire.transport import ENROLMENT_OPTIONS, SERVER_OPTIONS
from silo_wire.v1 import enrolment_pb2_grpc, operator_pb2_grpc

OPEN_FILES = 65_536
STOP_GRACE_S = 2.0
PROBE_TIMEOUT_S = 10.0


class Listener:
    """One port. `start` binds it, `stop` lets calls in flight end for a moment and closes it; both may be repeated."""

    def __init__(
        self, address: str, make: Callable[[], grpc.aio.Server], credentials: Callable[[], grpc.ServerCredentials]
    ) -> None:
        self._address = address
        self._make = make
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def listening(self) -> bool:
        return self._server is not None

    def require_free(self) -> None:
        """Raise ConfigurationError now rather than at a later `start` when the address cannot be bound."""
        try:
            require_bindable(address(self._address))
        except OSError as error:
            raise self._unusable() from error

    async def start(self) -> None:
        """Raises ConfigurationError when the address cannot be bound, StateError when it would speak TLS 1.2."""
        if self._server is not None:
            return
        _allow_open_files()
        server = self._make()
        try:
            port = server.add_secure_port(self._address, self._credentials())
        except RuntimeError:
            port = 0
        if port == 0:
            await server.stop(None)
            raise self._unusable()
        await server.start()
        try:
            speaks_it = await asyncio.to_thread(_speaks_tls_1_2, address(self._address).host, port)
        except asyncio.CancelledError:
            await server.stop(
                None
            )  # nobody else knows of it yet, and one that is left would keep the process from ending
            raise
        if speaks_it:
            await server.stop(None)
            raise StateError(
                f"{self._address} accepted TLS 1.2, which must be off: gRPC was imported before TLS 1.3 was set, or "
                "has changed; report this as a defect"
            )
        self._server = server

    def _unusable(self) -> ConfigurationError:
        return ConfigurationError(
            f"cannot listen on {self._address}: another process has the port, or the address is not of this host; "
            "change it under [listen] in federation.toml"
        )

    async def stop(self) -> None:
        if self._server is not None:
            if self._stopping is None:
                self._stopping = asyncio.create_task(self._server.stop(STOP_GRACE_S))
            # Shielded: grpc loses a cancellation that comes as its stop completes, and must not be stopped half-way.
            await asyncio.shield(self._stopping)
            self._server = self._stopping = None


def _allow_open_files() -> None:
    """Most systems give a process 1024 files unless it asks for more: so many strangers would keep every silo out."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _speaks_tls_1_2(host: str, port: int) -> bool:
    """Whether a handshake with nothing newer completes. gRPC tells nobody which versions it takes, so it is asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    try:
        with socket.create_connection((reachable(host), port), PROBE_TIMEOUT_S) as raw, context.wrap_socket(raw):
            return True
    except (ssl.SSLError, ConnectionResetError):
        return False


def silo_listener(
    address: str,
    *,
    presented: Presented,
    federation: FederationName,
    register: Register,
    held: HeldTrusts,
    on_refused: Callable[[Refusal], None],
    federation_service: FederationServicer,
    operator_service: operator_pb2_grpc.OperatorServicer,
) -> Listener:
    """Mutual TLS: silos and operators, told apart by their certificate's role."""
    gate = Gate(
        by_certificate(
            trust=lambda: presented.trust, federation=federation, require=register.require, admitted=held.admitted
        ),
        on_refused,
        OF_ONE_CALLER,
    )
    register.on_revoked.append(gate.revoked)
    presented.on_trust.append(gate.trusted)

    def make() -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=[gate], options=list(SERVER_OPTIONS))
        federation_service.add_to(server)
        operator_pb2_grpc.add_OperatorServicer_to_server(operator_service, server)
        return server

    return Listener(address, make, lambda: presented.credentials(clients=True))


def enrolment_listener(
    address: str,
    *,
    presented: Presented,
    on_refused: Callable[[Refusal], None],
    enrolment_service: enrolment_pb2_grpc.EnrolmentServicer,
) -> Listener:
    """Server-authenticated TLS: whoever holds a token."""

    def make() -> grpc.aio.Server:
        gate = Gate(anyone, on_refused, OF_ALL_STRANGERS)
        server = grpc.aio.server(interceptors=[gate], options=list(ENROLMENT_OPTIONS))
        enrolment_pb2_grpc.add_EnrolmentServicer_to_server(enrolment_service, server)
        return server

    return Listener(address, make, lambda: presented.credentials(clients=False))


async def serve_while_open(enrolment: Enrolment, listener: Listener) -> None:
    """Keep the enrolment listener up exactly while an invitation is open."""
    while True:
        await enrolment.until_open()
        await listener.start()
        enrolment.listening.set()
        await enrolment.until_closed()
        enrolment.listening.clear()
        await listener.stop()
