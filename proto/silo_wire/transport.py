"""gRPC as both sides use it: bounded messages, keepalive, and errors as status in one table. TLS 1.3 alone: see
silo_wire."""

import asyncio
import ctypes
from collections.abc import AsyncIterable, Coroutine, Sequence
from typing import Any, Final, TypeVar

import grpc
import grpc.aio

from lorica_security import errors
from lorica_security.errors import LoricaError, Unreachable

MAX_MESSAGE_BYTES: Final = 5 << 20
"""Above one chunk of 4 MiB with its frame; no message carries a whole model."""

ERROR_KEY: Final = "lorica-error"
MAX_DETAILS_CHARACTERS: Final = 600
"""Errors quote what a peer sent: more of it would fill logs, and the 8 KiB that gRPC has for a status."""

_STATUS: Final[dict[type[LoricaError], grpc.StatusCode]] = {
    errors.ConfigurationError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.IntegrityError: grpc.StatusCode.DATA_LOSS,
    errors.FalseModel: grpc.StatusCode.DATA_LOSS,
    errors.StorageError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DataError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.PolicyRefusal: grpc.StatusCode.PERMISSION_DENIED,
    errors.AuthenticationError: grpc.StatusCode.UNAUTHENTICATED,
    errors.OutsideValidity: grpc.StatusCode.UNAUTHENTICATED,
    errors.AuthorisationError: grpc.StatusCode.PERMISSION_DENIED,
    errors.MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    errors.WrongTime: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Conflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.UnsafeSql: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Unreachable: grpc.StatusCode.UNAVAILABLE,
}
_CLASSES: Final = {kind.__name__: kind for kind in _STATUS if kind is not errors.PolicyRefusal}

WINDOW_BYTES: Final = 2 << 20
"""What a peer may send on a stream before it is read: 2 MiB carry 160 Mbit/s over a round trip of 100 ms. Left to
itself gRPC lets it grow to 64 MiB, for each stream of each connection."""

FRAME_BYTES: Final = 256 << 10
"""Of a message; with gRPC's 16 KiB a transfer costs a twentieth more. On a slow line (10 Mbit/s) such a frame is a
fifth of a second, which nothing else on the connection notices."""


def _bounds(window_bytes: int) -> Sequence[tuple[str, int]]:
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.lookahead_bytes", window_bytes),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.max_frame_size", FRAME_BYTES),
        # What an idle connection keeps ready for its next read.
        ("grpc.experimental.tcp_max_read_chunk_size", FRAME_BYTES),
    )


_SERVER: Final[Sequence[tuple[str, int]]] = (
    ("grpc.server_handshake_timeout_ms", 20_000),  # a connection that never speaks TLS
    ("grpc.max_connection_idle_ms", 60_000),  # one that speaks it and calls nothing
    ("grpc.so_reuseport", 0),  # a second coordinator on the port must fail, not share it
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.max_concurrent_streams", 32),
)
SERVER_OPTIONS: Final[Sequence[tuple[str, int]]] = (*_bounds(WINDOW_BYTES), *_SERVER)
ENROLMENT_OPTIONS: Final[Sequence[tuple[str, int]]] = (*_bounds(1 << 16), *_SERVER)
"""For whoever can reach the port, without a certificate."""
CHANNEL_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    *_bounds(WINDOW_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.enable_http_proxy", 1),  # HTTPS_PROXY and NO_PROXY of the environment, through CONNECT
)

_MALLOPT: Final = {-3: 32 << 20, -1: 128 << 20, -8: 1}
"""mallopt(3): M_MMAP_THRESHOLD (its largest value), M_TRIM_THRESHOLD, M_ARENA_MAX (malloc_trim leaves the end of
others)."""


def keep_chunks_in_memory() -> None:
    """Have the C library reuse the memory of chunks: once per process that transfers models.

    Left to itself, glibc asks the kernel for each buffer of 1 MiB and gives it back, and the kernel clears each page
    anew: measured at a third of the CPU time of a transfer. Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in _MALLOPT.items():
            mallopt(parameter, value)


def give_memory_back() -> None:
    """Give the kernel what `keep_chunks_in_memory` has had the C library keep and nothing uses now: 2 to 10 ms."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


Q = TypeVar("Q")
R = TypeVar("R")


async def answer_to(call: "grpc.aio.StreamUnaryCall[Q, R]", pieces: AsyncIterable[Q]) -> R:
    """Send `pieces` over a new call and return the peer's answer, which may come before the last of them.

    After the first one the peer says when it takes more: by its initial metadata.

    Raises:
        grpc.aio.AioRpcError: the peer's refusal. A peer that refuses in mid-stream makes a write fail that is under
            way, and gRPC then overwrites the status that came from the peer with an INTERNAL of its own: the peer's
            is kept here.
    """
    told: list[grpc.aio.AioRpcError] = []

    def note(ended: grpc.aio.Call) -> None:
        told.append(
            grpc.aio.AioRpcError(
                _at_once(ended.code()),
                _at_once(ended.initial_metadata()),
                _at_once(ended.trailing_metadata()) or grpc.aio.Metadata(),
                _at_once(ended.details()),
            )
        )

    call.add_done_callback(note)
    try:
        try:
            first = True
            async for piece in pieces:
                await call.write(piece)
                if first:
                    await call.initial_metadata()
                    first = False
            await call.done_writing()
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.InternalError):
            pass  # the call is over; awaiting it tells how
        return await call
    except grpc.aio.AioRpcError as error:
        raise next((status for status in told if status.details() != _OVERWRITTEN), error) from None
    finally:
        call.cancel()


_OVERWRITTEN: Final = "Internal error from Core"


def _at_once(attribute: Coroutine[Any, Any, R]) -> R:
    """The result of an attribute of a call that has ended. gRPC makes it a coroutine, which ends without waiting."""
    try:
        attribute.send(None)
    except StopIteration as result:
        return result.value  # type: ignore[no-any-return]
    raise AssertionError("a call that is over made its reader wait")


def status_of(error: LoricaError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Code, bounded one-line details and trailing metadata that tell the peer of `error`."""
    kind = errors.kind_of(error)
    details = str(error)
    if len(details) > MAX_DETAILS_CHARACTERS:
        details = f"{details[: MAX_DETAILS_CHARACTERS - 3]}..."
    return _STATUS[kind], details, ((ERROR_KEY, kind.__name__),)


def error_of(error: grpc.aio.AioRpcError) -> LoricaError:
    """The error that a failed call stands for, marked as the peer's word, so that callers never look at gRPC codes."""
    told = _error_of(error)
    told.told_by_peer = True
    return told


def _error_of(error: grpc.aio.AioRpcError) -> LoricaError:
    code = error.code()
    details = error.details() or code.name.lower()
    trailing = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == ERROR_KEY and isinstance(value, str) and value in _CLASSES:
            return _CLASSES[value](details)
    match code:
        case grpc.StatusCode.UNAUTHENTICATED:
            return errors.AuthenticationError(details)
        case grpc.StatusCode.PERMISSION_DENIED:
            return errors.AuthorisationError(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.INVALID_ARGUMENT:
            return errors.MalformedMessage(details)
        case _:
            return Unreachable(details)
