"""The stream of the coordinator's orders: each is checked to be for this federation."""

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from lorica_security.errors import (
    AuthenticationError,
    AuthorisationError,
    Conflict,
    LoricaError,
    MalformedMessage,
    StateError,
    Unreachable,
)
from silo_agent.edges.wire.calls.repeated_calls import PASSES, Calls
from silo_agent.edges.wire.connection import Wire
from silo_wire import wire_version
from silo_wire.codecs.orders_codec import order_from_wire
from silo_wire.codecs.renewal import trust_digest_from_wire
from silo_wire.messages import Evaluate, Mask, Order, Train
from silo_wire.transport import error_of
from silo_wire.v1 import federation_pb2
from silo_wire.wire_version import Speaker, require_compatible

_ENDS_THE_AGENT = (AuthenticationError, AuthorisationError, Conflict)


class OrderStream(Calls):
    """The orders of the coordinator, over as many connections as it takes."""

    async def orders(self) -> AsyncIterator[Order]:
        backoff = self._new_backoff()
        before: _Attending | None = None
        try:
            while True:
                attending = _Attending(self._wire, self._attend_request())
                problem: LoricaError = Unreachable("the coordinator ended the connection")
                heard = False
                try:
                    while (notice := await attending.next()) is not None:
                        if not heard:
                            self._hear(notice)
                            heard = True
                        order = order_from_wire(notice)
                        self._require_ours(order)
                        backoff.reset()
                        self._traffic.attending(True)
                        if before is not None:
                            await before.end()  # the seat has passed to this stream: the coordinator missed nobody
                            before = None
                        if notice.trust_bundle:
                            self.on_trust(trust_digest_from_wire(notice.trust_bundle, "notice"))
                        if notice.release_groups:
                            self.on_groups(notice.release_groups)
                        yield order
                except grpc.aio.AioRpcError as error:
                    problem = error_of(error)
                except (MalformedMessage, StateError) as error:
                    problem = error
                finally:
                    if before is not None:
                        await before.end()
                        before = None
                    if attending.moved_on:
                        before = attending  # until a stream over the new channel has taken its place
                    else:
                        await attending.end()
                if before is not None:
                    continue
                self._traffic.attending(False)
                if isinstance(problem, _ENDS_THE_AGENT) and not isinstance(problem, PASSES):
                    raise problem
                await self._wait(problem, backoff)
        finally:
            if before is not None:
                await before.end()

    def _attend_request(self) -> federation_pb2.AttendRequest:
        return federation_pb2.AttendRequest(
            key=self._key(),
            wire_version=wire_version.OURS.major,
            wire_minor=wire_version.OURS.minor,
            agent_instance=self._instance,
            agent_version=self._agent_version,
        )

    def _hear(self, notice: federation_pb2.Notice) -> None:
        """Raises StateError for a coordinator whose wire is too far from this agent's: it is tried again, until one
        side was upgraded."""
        speaker = Speaker.from_wire(notice.coordinator_version, major=wire_version.OURS.major, minor=notice.wire_minor)
        require_compatible(agent=wire_version.OURS, coordinator=speaker.wire, silo=self._credentials.silo)
        self.on_speaker(speaker)

    def _require_ours(self, order: Order) -> None:
        if isinstance(order, Train | Mask | Evaluate) and order.key.federation != self._credentials.federation:
            raise MalformedMessage(
                f"the coordinator sends an order for federation {order.key.federation!r}, this silo is of "
                f"{self._credentials.federation!r}"
            )


class _Attending:
    """One stream of orders, over one channel."""

    def __init__(self, wire: Wire, request: federation_pb2.AttendRequest) -> None:
        self._wire = wire
        self._lease = wire.lease()
        self._call = wire.stub.Attend(request)
        self._reading: asyncio.Task[federation_pb2.Notice | None] | None = None
        self.moved_on = False

    async def next(self) -> federation_pb2.Notice | None:
        """None when the coordinator has ended the stream, and once newer calls go over another channel (`moved_on`)."""
        self._reading = asyncio.create_task(self._read())
        moving = asyncio.create_task(self._wire.superseded.wait())
        try:
            await asyncio.wait({self._reading, moving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moving.cancel()
        if not self._reading.done():  # not cancelled: that would end the call, and with it this silo's seat
            self.moved_on = True
            return None
        notice, self._reading = self._reading.result(), None
        return notice

    async def _read(self) -> federation_pb2.Notice | None:
        notice = await self._call.read()
        return notice if isinstance(notice, federation_pb2.Notice) else None

    async def end(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            await asyncio.wait({self._reading})
            if not self._reading.cancelled():
                self._reading.exception()
        self._lease.release()
