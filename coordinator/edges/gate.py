"""What every call passes before a servicer sees it: who are you, may you, and what becomes of an error.

The identity comes from the certificate that TLS verified, is checked again in full (security.pki.peer) and compared
with the authorisation table. It is handed on in CALLER; no servicer reads an identity from anywhere else. Errors of
security.errors become status in the one table of silo_wire.transport; anything else is a defect, logged with its
traceback and told to the peer as "internal error" alone.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import structlog
from google.protobuf.message import DecodeError

from coordinator.edges.authorisation import authorise
from security.errors import AuthenticationError, LoricaError, MalformedMessage, kind_of
from security.identifiers import FederationName, Identity
from security.pki.peer import identify_client
from security.pki.trust_bundle import TrustBundle
from silo_wire.transport import status_of

import grpc  # isort: skip  # after silo_wire, which leaves TLS 1.3 alone
import grpc.aio  # isort: skip

CALLER: Final[ContextVar[Identity]] = ContextVar("CALLER")
DEFECT: Final = "Defect"
_log = structlog.get_logger(__name__)

Call = Callable[[str, Any], Identity | None]


def by_certificate(*, trust: TrustBundle, federation: FederationName) -> Call:
    """Identify and authorise a caller by its verified client certificate."""

    def admit(method: str, context: Any) -> Identity:
        presented = context.auth_context().get("x509_pem_cert", [])
        if len(presented) != 1:
            raise AuthenticationError("no client certificate was presented: enrol first, then connect with it")
        identity = identify_client(presented[0], trust=trust, now=datetime.now(UTC), federation=federation)
        authorise(identity, method)
        return identity

    return admit


def anyone(method: str, context: Any) -> None:
    """The enrolment listener knows nobody yet; its service checks tokens."""


class Gate(grpc.aio.ServerInterceptor):  # gRPC offers interception by subclass alone
    """Wraps every handler of one listener; `on_refused` is told the class name of each error, or DEFECT."""

    def __init__(self, admit: Call, on_refused: Callable[[str], None]) -> None:
        self._admit = admit
        self._on_refused = on_refused

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        parse = _parser(handler.request_deserializer)
        requests = _parsed_stream if handler.request_streaming else _parsed
        if handler.response_streaming:
            inner_stream = handler.unary_stream or handler.stream_stream

            async def streaming(request: Any, context: Any) -> AsyncIterator[Any]:
                try:
                    self._enter(method, context)
                    async for message in inner_stream(requests(parse, request), context):
                        yield message
                except LoricaError as error:
                    await self._abort(method, context, error)
                except grpc.aio.BaseError:
                    raise  # the connection's end, which gRPC deals with
                except Exception as error:  # noqa: BLE001  # the last place where a defect can be kept from the peer
                    await self._break_off(method, context, error)

            make: Any = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            return make(streaming, None, handler.response_serializer)

        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def single(request: Any, context: Any) -> Any:
            try:
                self._enter(method, context)
                return await inner(requests(parse, request), context)
            except LoricaError as error:
                await self._abort(method, context, error)
            except grpc.aio.BaseError:
                raise
            except Exception as error:  # noqa: BLE001  # as above
                await self._break_off(method, context, error)

        make = (
            grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(single, None, handler.response_serializer)

    def _enter(self, method: str, context: Any) -> None:
        identity = self._admit(method, context)
        if identity is not None:
            CALLER.set(identity)

    async def _abort(self, method: str, context: Any, error: LoricaError) -> NoReturn:
        caller = CALLER.get(None)
        code, details, trailing = status_of(error)
        _log.warning(
            "call refused",
            method=method,
            peer=caller.uri if caller else context.peer(),
            kind=kind_of(error).__name__,
            fault=error.fault.value,
            error=details,
        )
        self._on_refused(kind_of(error).__name__)
        await context.abort(code, details, trailing)
        raise AssertionError("abort returned")

    async def _break_off(self, method: str, context: Any, error: Exception) -> NoReturn:
        _log.error("defect", method=method, exc_info=error)
        self._on_refused(DEFECT)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error of the coordinator: its log says more")
        raise AssertionError("abort returned")


Parse = Callable[[bytes], Any]


def _parser(deserialise: Parse) -> Parse:
    """gRPC would answer bytes that are no message with a status of its own, past every counter and log."""

    def parse(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError as error:
            raise MalformedMessage(f"a request of {len(data)} bytes cannot be read: {error}") from error

    return parse


def _parsed(parse: Parse, request: bytes) -> Any:
    return parse(request)


async def _parsed_stream(parse: Parse, requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for request in requests:
        yield parse(request)
