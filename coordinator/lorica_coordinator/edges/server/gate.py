"""What every call passes before a servicer sees it: who are you, may you, how much of this server do you hold already,
and what becomes of an error.

The identity comes from the certificate that TLS verified, is checked again in full (lorica_security.pki.peer), looked
up in the coordinator's register and compared with the authorisation table. It is handed on in CALLER; no servicer reads
an identity from anywhere else. A call that is open when its caller is revoked, when its certificate expires, or when
the authority of that is retired, is cut there and then. Errors of lorica_security.errors become status in the one table
of silo_wire.transport; silos are told no path of this machine (told). Anything else is a defect, logged with its
traceback and told to the peer as "internal error" alone.

No request is read before its caller is known and within its limits. gRPC takes in a message of MAX_MESSAGE_BYTES for
whoever began to send one, and keeps it until the rest has come: without limits a single silo fills the server's memory
with beginnings. That is why every call is served as a stream of requests, also one that has only one.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import structlog
from cryptography.x509 import Certificate
from google.protobuf.message import DecodeError

from lorica_coordinator.edges.server.authorisation import authorise
from lorica_coordinator.edges.server.told import told
from lorica_coordinator.edges.telemetry.caller import CALLER, CERTIFICATE
from lorica_security.errors import (
    AuthenticationError,
    AuthorisationError,
    LoricaError,
    MalformedMessage,
    OutsideValidity,
    Unreachable,
    kind_of,
)
from lorica_security.identifiers import FederationName, Identity
from lorica_security.pki.authority_succession import certificate_digest
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import identify_client
from lorica_security.pki.trust_bundle import TrustBundle
from lorica_security.pki.validity import Window
from silo_wire.transport import status_of

DEFECT: Final = "Defect"
LOOK_S: Final = 60.0
"""Between two looks at the clock, for as long as a call is open."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, and the certificate that says so."""

    identity: Identity
    certificate: Certificate


Admit = Callable[[str, Any], Caller | None]
Parse = Callable[[bytes], Any]


def by_certificate(
    *,
    trust: Callable[[], TrustBundle],
    federation: FederationName,
    require: Callable[[Identity, str, str], None],
    admitted: Callable[[Identity, str], None],
) -> Admit:
    """Identify and authorise a caller by its verified client certificate; what is trusted is asked at each call,
    `require` raises unless its serial and digest are registered, `admitted` hears of each that is let in."""

    def admit(method: str, context: Any) -> Caller:
        presented = context.auth_context().get("x509_pem_cert", [])
        if len(presented) != 1:
            raise AuthenticationError("no client certificate was presented: enrol first, then connect with it")
        identity = identify_client(presented[0], trust=trust(), now=datetime.now(UTC), federation=federation)
        certificate = parse_certificate(presented[0])
        serial = f"{certificate.serial_number:x}"
        require(identity, serial, certificate_digest(certificate).hex())
        authorise(identity, method)
        admitted(identity, serial)
        return Caller(identity, certificate)

    return admit


def anyone(method: str, context: Any) -> None:
    """The enrolment listener knows nobody yet; its service checks tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one caller may hold of a listener at once.

    `calls` open, each up to WINDOW_BYTES of memory; `requests` that are being read, each up to a message of memory;
    seconds from the beginning of a call to its first whole request, waiting for one's own other requests included.
    """

    calls: int
    requests: int
    first_request_s: float = 20.0


OF_ONE_CALLER: Final = Limits(calls=12, requests=6)
"""An agent holds four calls at most; twice as many more may be its own from before its network broke."""
OF_ALL_STRANGERS: Final = Limits(calls=64, requests=8)
"""On the enrolment listener nobody is known: all share one."""


class _OpenCall:
    """One that can be cut: its task is cancelled, and the caller told why. Servicers have it for gRPC's context.

    What is sent is sent in a task of its own, which no cut cancels. gRPC ends a call that is cancelled within its own
    code without a status, so that its caller would wait for good; and it takes no status beside headers that are under
    way. What cleans up after a stream of answers may be cancelled once more, by a caller that hangs up: it awaits
    nothing that it cannot do without.
    """

    def __init__(self, context: Any) -> None:
        self._task = asyncio.current_task()
        self._context = context
        self._sending: asyncio.Future[None] | None = None
        self.certificate: Certificate | None = None
        self.cut_by: LoricaError | None = None

    def peer(self) -> str:
        return str(self._context.peer())

    async def send_initial_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        await self._send(self._context.send_initial_metadata(metadata))

    async def write(self, message: Any) -> None:
        """As far as the caller reads."""
        await self._send(self._context.write(message))

    async def _send(self, what: Awaitable[None]) -> None:
        self._sending = asyncio.ensure_future(what)
        self._sending.add_done_callback(lambda sent: sent.cancelled() or sent.exception())  # of a caller that is gone
        await asyncio.shield(self._sending)

    async def end(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        """With this status, once what was under way has gone out. Raises as gRPC's abort."""
        if self._sending is not None:
            await asyncio.wait({self._sending})
        await self._context.abort(code, details, trailing)

    def cut(self, error: LoricaError) -> None:
        assert self._task is not None
        if self.cut_by is None:
            self.cut_by = error
            self._task.cancel()

    def taken_back(self) -> LoricaError:
        """Why it was cut, once its cancellation has arrived; raises CancelledError where somebody else cancelled it."""
        if self.cut_by is None:
            raise asyncio.CancelledError
        assert self._task is not None
        self._task.uncancel()
        return self.cut_by


class _Expiry:
    """Cuts a call when its caller's certificate has ended. The clock may be set meanwhile, so it looks at it again and
    again."""

    def __init__(self, call: _OpenCall, name: str, certificate: Certificate) -> None:
        self._call, self._name, self._window = call, name, Window.of(certificate)
        self._look()

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        now = datetime.now(UTC)
        left = (self._window.end - now).total_seconds()
        wait = min(left + 1e-3, LOOK_S)  # the last moment is a good one
        if left < 0:
            self._call.cut(OutsideValidity(f"certificate of {self._name} {self._window.problem_at(now)}"))
            wait = LOOK_S
        self._timer = asyncio.get_running_loop().call_later(wait, self._look)


class _Share:
    """What a caller holds now."""

    def __init__(self, limits: Limits) -> None:
        self.calls: set[_OpenCall] = set()
        self.requests = asyncio.Semaphore(limits.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call that was turned away, or failed: the class of the error, or DEFECT; `peer` is the caller's URI, or where
    it came from."""

    kind: str
    method: str
    peer: str
    detail: str


class Gate(grpc.aio.ServerInterceptor):  # gRPC offers interception by subclass alone
    """Wraps every handler of one listener; `on_refused` is told of each call that fails."""

    def __init__(self, admit: Admit, on_refused: Callable[[Refusal], None], limits: Limits) -> None:
        self._admit = admit
        self._on_refused = on_refused
        self._limits = limits
        self._shares: dict[str, _Share] = {}

    def revoked(self, identity: Identity) -> None:
        """End every call of `identity` that is open now."""
        error = AuthorisationError(
            f"{identity.uri} was revoked, or enrolled anew with other keys: ask the coordinator's operator"
        )
        share = self._shares.get(identity.uri)
        for call in tuple(share.calls) if share is not None else ():
            call.cut(error)

    def trusted(self, trust: TrustBundle) -> None:
        """End every open call whose certificate is of an authority outside `trust`. Whoever has a newer one comes again
        with it."""
        for share in tuple(self._shares.values()):
            for call in tuple(share.calls):
                if call.certificate is not None and not trust.issuers_of(call.certificate):
                    call.cut(
                        Unreachable("the authority of this call's certificate was retired: connect with a newer one")
                    )

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        parse = _parser(handler.request_deserializer)
        requests: Callable[..., Any] = self._stream if handler.request_streaming else self._single
        inner: Callable[..., Any] = (
            handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        )

        async def served(raw: AsyncIterator[bytes], context: Any) -> Any:
            call = _OpenCall(context)
            try:
                with self._entered(method, context, call) as share:
                    request = await requests(parse, raw, share)
                    if not handler.response_streaming:
                        return await inner(request, call)
                    async with aclosing(inner(request, call)) as answers:
                        async for message in answers:
                            await call.write(message)
            except asyncio.CancelledError:
                await self._abort(method, call, call.taken_back())
            except LoricaError as error:
                await self._abort(method, call, error)
            except grpc.aio.BaseError:
                raise  # the connection's end, which gRPC deals with
            except Exception as error:  # noqa: BLE001  # the last place where a defect can be kept from the peer
                await self._break_off(method, call, error)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(served, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(served, None, handler.response_serializer)

    @contextmanager
    def _entered(self, method: str, context: Any, call: _OpenCall) -> Iterator[_Share]:
        _require_own_handshake(context)
        caller = self._admit(method, context)
        name, expiry = "", None
        if caller is not None:
            CALLER.set(caller.identity)
            CERTIFICATE.set(caller.certificate)
            name = caller.identity.uri
        share = self._shares.setdefault(name, _Share(self._limits))
        if len(share.calls) >= self._limits.calls:
            raise Unreachable(
                f"{len(share.calls)} calls are open, which is all that a caller may have: wait until one ends"
            )
        if caller is not None:
            call.certificate = caller.certificate
            expiry = _Expiry(call, name, caller.certificate)
        share.calls.add(call)
        try:
            yield share
        finally:
            if expiry is not None:
                expiry.cancel()
            share.calls.discard(call)
            if not share.calls:
                del self._shares[name]

    async def _single(self, parse: Parse, raw: AsyncIterator[bytes], share: _Share) -> Any:
        message = await self._first(aiter(raw), share)
        if message is None:
            raise MalformedMessage("the call ended before its request had come")
        return parse(message)

    async def _stream(self, parse: Parse, raw: AsyncIterator[bytes], share: _Share) -> AsyncIterator[Any]:
        messages = aiter(raw)

        async def parsed() -> AsyncIterator[Any]:
            message = await self._first(messages, share)
            while message is not None:
                yield parse(message)
                message = None
                async with share.requests:  # how long the rest may take is the round's to say
                    message = await anext(messages, None)

        return parsed()

    async def _first(self, messages: AsyncIterator[bytes], share: _Share) -> bytes | None:
        seconds = self._limits.first_request_s
        try:
            async with asyncio.timeout(seconds), share.requests:
                return await anext(messages, None)
        except TimeoutError as error:
            raise Unreachable(f"the request did not come within {seconds:.0f} s of its call: send it again") from error

    async def _abort(self, method: str, call: _OpenCall, error: LoricaError) -> NoReturn:
        caller = CALLER.get(None)
        code, details, trailing = status_of(error)
        kind = kind_of(error).__name__
        _log.warning(
            "call refused",
            method=method,
            peer=caller.uri if caller else call.peer(),
            kind=kind,
            fault=error.fault.value,
            error=details,
        )
        self._on_refused(Refusal(kind=kind, method=method, peer=_peer(call), detail=details))
        await call.end(code, told(error, details, caller), trailing)
        raise AssertionError("abort returned")

    async def _break_off(self, method: str, call: _OpenCall, error: Exception) -> NoReturn:
        _log.error("defect", method=method, exc_info=error)
        self._on_refused(Refusal(kind=DEFECT, method=method, peer=_peer(call), detail="see the coordinator's log"))
        await call.end(grpc.StatusCode.INTERNAL, "internal error of the coordinator: its log says more")
        raise AssertionError("abort returned")


def _require_own_handshake(context: Any) -> None:
    """gRPC has no switch for session tickets: whoever has stolen one could act as a silo without the silo's key."""
    if context.auth_context().get("ssl_session_reused") != [b"false"]:
        raise AuthenticationError(
            "the call came over a resumed TLS session, which proves no key: connect with a full handshake"
        )


def _peer(call: _OpenCall) -> str:
    """The caller's URI; of a stranger the address, without the port, which is another with each connection."""
    caller = CALLER.get(None)
    return caller.uri if caller else call.peer().rpartition(":")[0]


def _parser(deserialise: Parse) -> Parse:
    """gRPC would answer bytes that are no message with a status of its own, past every counter and log."""

    def parse(data: bytes) -> Any:
        try:
            return deserialise(data)
        except DecodeError as error:
            raise MalformedMessage(f"a request of {len(data)} bytes cannot be read: {error}") from error

    return parse
