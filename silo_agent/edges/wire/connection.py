"""One channel with its calls, and when it may be closed: a renewed certificate needs a new channel, calls under way
keep theirs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from silo_wire.codecs.chunk_piece import write
from silo_wire.v1 import federation_pb2, federation_pb2_grpc

_SERVICE = federation_pb2.DESCRIPTOR.services_by_name["Federation"].full_name


class Lease:
    """While it is held, its channel stays open."""

    def __init__(self, wire: "Wire") -> None:
        self._wire: Wire | None = wire
        wire.users += 1
        wire.unused.clear()

    def release(self) -> None:
        """May be repeated."""
        if (wire := self._wire) is not None:
            self._wire = None
            wire.users -= 1
            if wire.users == 0:
                wire.unused.set()


class Wire:
    """`superseded` is set once newer calls go elsewhere."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: federation_pb2_grpc.FederationAsyncStub = federation_pb2_grpc.FederationStub(channel)
        # The transfers of chunks, without protobuf's copies of each.
        self.model_pieces: grpc.aio.UnaryStreamMultiCallable[federation_pb2.FetchModelRequest, bytes] = (
            channel.unary_stream(
                f"/{_SERVICE}/FetchModel", request_serializer=federation_pb2.FetchModelRequest.SerializeToString
            )
        )
        self.chunk_pieces: grpc.aio.UnaryStreamMultiCallable[federation_pb2.PiecesRequest, bytes] = (
            channel.unary_stream(
                f"/{_SERVICE}/FetchPieces", request_serializer=federation_pb2.PiecesRequest.SerializeToString
            )
        )
        self.upload_update = channel.stream_unary(
            f"/{_SERVICE}/UploadUpdate",
            request_serializer=write,
            response_deserializer=federation_pb2.UpdateReceipt.FromString,
        )
        self.users = 0
        self.superseded = asyncio.Event()
        self.unused = asyncio.Event()
        self.unused.set()

    def lease(self) -> Lease:
        return Lease(self)

    @asynccontextmanager
    async def used(self) -> AsyncIterator["Wire"]:
        """For the length of a call."""
        lease = self.lease()
        try:
            yield self
        finally:
            lease.release()

    async def supersede(self) -> None:
        """Close the channel once the calls on it have ended; at once when this is cancelled."""
        self.superseded.set()
        try:
            await self.unused.wait()
        finally:
            await self.channel.close()
