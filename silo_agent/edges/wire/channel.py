"""A gRPC channel to the coordinator: its certificate must carry the federation's own name, whatever address is
dialled."""

from typing import Any

import grpc
import grpc.aio
import structlog
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from lorica_security.errors import ConfigurationError, LoricaError
from lorica_security.identifiers import FederationName, coordinator_dns_name
from lorica_security.pkcs11_keys.reference import in_token
from lorica_security.pki.tls_key import TlsPrivateKey
from silo_agent.edges.keys.key_store import SiloCredentials, split_address
from silo_agent.edges.wire.https_proxy import ConnectProxy, proxy_for
from silo_wire.tls import require_tls_1_3
from silo_wire.transport import CHANNEL_OPTIONS

_log = structlog.stdlib.get_logger("silo-agent")


def mutual_channel(credentials: SiloCredentials, *, relay: str = "") -> grpc.aio.Channel:
    """To the listener that asks for our certificate, through a `relay` (host:port) of this machine where one is
    named."""
    tls = _client_tls(credentials)
    if relay:
        return _channel(relay, credentials.federation, tls, None)
    return _channel(credentials.address, credentials.federation, tls, _proxy(credentials.address))


def _client_tls(credentials: SiloCredentials) -> grpc.ChannelCredentials:
    roots = credentials.trust.of_federation(credentials.federation).to_pem()
    if not in_token(credentials.tls_key):
        return grpc.ssl_channel_credentials(roots, credentials.tls_key_pem, credentials.certificate_pem)
    try:
        from grpc.experimental import ssl_channel_credentials_with_custom_signer as signed_elsewhere
    except ImportError as error:
        raise ConfigurationError(
            f"grpcio {grpc.__version__} cannot connect with a key that lies in a token: install grpcio 1.85, or enrol "
            "with a TLS key in a file"
        ) from error
    tls: grpc.ChannelCredentials = signed_elsewhere(
        private_key_sign_fn=_Signing(credentials.tls_key),
        root_certificates=roots,
        certificate_chain=credentials.certificate_pem,
    )
    return tls


class _Signing:
    """What gRPC calls in the middle of a handshake, with the bytes to sign and the algorithm that both sides chose.

    Lent to no other thread: gRPC's own waits for it, and a token takes a millisecond to a tenth of a second.
    """

    def __init__(self, key: TlsPrivateKey) -> None:
        self._key = key
        self._hash: hashes.HashAlgorithm = hashes.SHA256() if key.key_size == 256 else hashes.SHA384()

    def __call__(self, data: bytes, algorithm: Any, on_complete: Any) -> bytes:
        """TLS 1.3 has one algorithm for each curve (RFC 8446 4.2.3)."""
        try:
            return self._key.sign(data, ec.ECDSA(self._hash))
        except LoricaError as error:
            _log.error("tls-key-in-token", error=str(error))  # gRPC says no more than UNAVAILABLE
            raise


def pinned_channel(address: str, federation: FederationName, certificate_pem: bytes) -> grpc.aio.Channel:
    """To the enrolment listener, if it answers with exactly this certificate."""
    tls = grpc.ssl_channel_credentials(root_certificates=certificate_pem)
    return _channel(address, federation, tls, _proxy(address))


def _proxy(address: str) -> ConnectProxy | None:
    host, _ = split_address(address)
    return proxy_for(host)


def _channel(
    address: str, federation: FederationName, tls: grpc.ChannelCredentials, proxy: ConnectProxy | None
) -> grpc.aio.Channel:
    require_tls_1_3()
    options: list[tuple[str, str | int]] = [
        *((key, value) for key, value in CHANNEL_OPTIONS if key != "grpc.enable_http_proxy"),
        ("grpc.ssl_target_name_override", coordinator_dns_name(federation)),
        ("grpc.enable_http_proxy", 1 if proxy else 0),
    ]
    if proxy:
        options.append(("grpc.http_proxy", proxy.url))
    return grpc.aio.secure_channel(address, tls, options=options)
