"""Any RPC of the wire by its name, so that a test can play one attack against all of them."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from silo_wire.v1 import common_pb2, federation_pb2, operator_pb2

TIMEOUT_S = 20.0
FEDERATION_CALLS: list[MethodDescriptor] = list(federation_pb2.DESCRIPTOR.services_by_name["Federation"].methods)
OPERATOR_CALLS: list[MethodDescriptor] = list(operator_pb2.DESCRIPTOR.services_by_name["Operator"].methods)


def request_for(method: MethodDescriptor, key: common_pb2.CallKey) -> Any:
    """The emptiest message of this call that carries `key`, where it carries one at all."""
    if method.name == "UploadUpdate":
        return federation_pb2.UpdatePiece(header=federation_pb2.UpdateHeader(key=key))
    kind = GetMessageClass(method.input_type)
    return kind(key=key) if "key" in method.input_type.fields_by_name else kind()


async def call(channel: grpc.aio.Channel, method: MethodDescriptor, request: Any) -> Any:
    """The first reply, or AioRpcError."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    reply = GetMessageClass(method.output_type)
    kind = f"{_arity(method.client_streaming)}_{_arity(method.server_streaming)}"
    invoke = getattr(channel, kind)(
        path, request_serializer=lambda message: message.SerializeToString(), response_deserializer=reply.FromString
    )
    called = invoke(_one(request) if method.client_streaming else request, timeout=TIMEOUT_S)
    if not method.server_streaming:
        return await called
    try:
        async for message in called:
            return message
    finally:
        called.cancel()
    return None


def _arity(streams: bool) -> str:
    return "stream" if streams else "unary"


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request
