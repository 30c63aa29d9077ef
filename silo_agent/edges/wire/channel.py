"""A gRPC channel to the coordinator: its certificate must carry the federation's own name, whatever address is
dialled."""

import grpc
import grpc.aio

from lorica_security.identifiers import FederationName, coordinator_dns_name
from silo_agent.edges.keys.key_store import SiloCredentials, split_address
from silo_agent.edges.wire.https_proxy import ConnectProxy, proxy_for
from silo_wire.tls import require_tls_1_3
from silo_wire.transport import CHANNEL_OPTIONS


def mutual_channel(credentials: SiloCredentials, *, relay: str = "") -> grpc.aio.Channel:
    """To the listener that asks for our certificate, through a `relay` (host:port) of this machine where one is
    named."""
    tls = grpc.ssl_channel_credentials(
        root_certificates=credentials.trust.of_federation(credentials.federation).to_pem(),
        private_key=credentials.tls_key_pem,
        certificate_chain=credentials.certificate_pem,
    )
    if relay:
        return _channel(relay, credentials.federation, tls, None)
    return _channel(credentials.address, credentials.federation, tls, _proxy(credentials.address))


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
