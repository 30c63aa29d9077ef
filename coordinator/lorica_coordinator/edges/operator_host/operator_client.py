"""The operator's side of the Operator service: one channel with the operator's certificate, one call, one value."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import grpc
import grpc.aio

from lorica_coordinator.edges.keys.key_store import TlsPair
from lorica_security.errors import Unreachable
from lorica_security.identifiers import FederationName, coordinator_dns_name
from lorica_security.pki.trust_bundle import TrustBundle
from silo_wire.tls import require_tls_1_3
from silo_wire.transport import CHANNEL_OPTIONS, error_of
from silo_wire.v1 import operator_pb2_grpc

CALL_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 15.0

Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorAccess:
    """Where the coordinator is, and the operator's certificate. `remote`: on another host, perhaps behind
    HTTPS_PROXY."""

    address: str
    federation: FederationName
    pair: TlsPair
    trust: TrustBundle
    remote: bool = False

    def call(
        self,
        ask: Callable[["operator_pb2_grpc.OperatorAsyncStub"], Awaitable[Reply]],
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
    ) -> Reply:
        """`ask` a running coordinator; raises its error, or Unreachable naming the address."""
        return asyncio.run(self._call(ask, timeout_s))

    async def _call(
        self,
        ask: Callable[["operator_pb2_grpc.OperatorAsyncStub"], Awaitable[Reply]],
        timeout_s: float | None,
    ) -> Reply:
        require_tls_1_3()
        credentials = grpc.ssl_channel_credentials(self.trust.to_pem(), self.pair.key_pem, self.pair.certificate_pem)
        options = [
            *(option for option in CHANNEL_OPTIONS if option[0] != "grpc.enable_http_proxy"),
            ("grpc.ssl_target_name_override", coordinator_dns_name(self.federation)),
            ("grpc.enable_http_proxy", int(self.remote)),
        ]
        async with grpc.aio.secure_channel(self.address, credentials, options=options) as channel:
            await self._connected(channel)
            try:
                async with asyncio.timeout(timeout_s):
                    return await ask(operator_pb2_grpc.OperatorStub(channel))
            except grpc.aio.AioRpcError as error:
                told = error_of(error)
                if isinstance(told, Unreachable):
                    raise Unreachable(f"coordinator at {self.address} does not answer: {told}") from error
                raise told from error
            except TimeoutError as error:
                raise Unreachable(f"coordinator at {self.address} did not answer within {timeout_s:.0f} s") from error

    async def _connected(self, channel: grpc.aio.Channel) -> None:
        ready = asyncio.ensure_future(channel.channel_ready())
        done, _ = await asyncio.wait([ready], timeout=CONNECT_TIMEOUT_S)  # it may be starting
        if not done:
            # Cut off, what it waits for would end in this process' next event loop, which prints that this one is
            # closed.
            await channel.close()
            with suppress(grpc.aio.UsageError):
                await ready
            raise Unreachable(f"coordinator at {self.address} does not answer: see its log")
        ready.result()
