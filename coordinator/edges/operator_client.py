"""The operator's side of the Operator service: one channel with the operator's certificate, one call, one value."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from coordinator.edges.key_store import TlsPair
from security.errors import Unreachable
from security.identifiers import FederationName, coordinator_dns_name
from security.pki.trust_bundle import TrustBundle
from silo_wire.transport import CHANNEL_OPTIONS, error_of
from silo_wire.v1 import operator_pb2_grpc

import grpc  # isort: skip  # after silo_wire, which leaves TLS 1.3 alone
import grpc.aio  # isort: skip

CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 15.0

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAccess:
    """Where the coordinator is, and the operator's certificate."""

    address: str
    federation: FederationName
    pair: TlsPair
    trust: TrustBundle

    def call(self, ask: Callable[["operator_pb2_grpc.OperatorAsyncStub"], Awaitable[Reply]]) -> Reply:
        """`ask` a running coordinator; raises its error, or Unreachable naming the address."""
        return asyncio.run(self._call(ask))

    async def _call(self, ask: Callable[["operator_pb2_grpc.OperatorAsyncStub"], Awaitable[Reply]]) -> Reply:
        credentials = grpc.ssl_channel_credentials(self.trust.to_pem(), self.pair.key_pem, self.pair.certificate_pem)
        options = [
            *CHANNEL_OPTIONS,
            ("grpc.ssl_target_name_override", coordinator_dns_name(self.federation)),
            ("grpc.enable_http_proxy", 0),  # this host
        ]
        async with grpc.aio.secure_channel(self.address, credentials, options=options) as channel:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):  # it may be starting
                    await channel.channel_ready()
            except TimeoutError as error:
                raise Unreachable(f"coordinator at {self.address} does not answer: see its log") from error
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    return await ask(operator_pb2_grpc.OperatorStub(channel))
            except grpc.aio.AioRpcError as error:
                told = error_of(error)
                if isinstance(told, Unreachable):
                    raise Unreachable(f"coordinator at {self.address} does not answer: {told}") from error
                raise told from error
            except TimeoutError as error:
                raise Unreachable(
                    f"coordinator at {self.address} did not answer within {CALL_TIMEOUT_S:.0f} s"
                ) from error
