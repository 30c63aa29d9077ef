"""Tables of what bounds a peer, and of what the checks find."""

from collections.abc import Iterable

from lorica.documentation.markdown import markdown_table
from lorica_coordinator.edges.check.misconfigurations import Mistake as CoordinatorMistake
from lorica_coordinator.edges.server.gate import OF_ALL_STRANGERS, OF_ONE_CALLER
from lorica_coordinator.edges.server.grpc_server import OPEN_FILES
from lorica_security.console.preflight import Misconfiguration
from lorica_security.daemon.http_server import MAX_CONNECTIONS, MAX_CONNECTIONS_OF_ONE, MAX_HEAD_BYTES, REQUEST_S
from silo_agent.edges.check.misconfigurations import Mistake as SiloMistake
from silo_wire.transport import ENROLMENT_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS

# --- limits


def limits_table() -> str:
    server, strangers = dict(SERVER_OPTIONS), dict(ENROLMENT_OPTIONS)
    seconds = {name: value // 1000 for name, value in server.items() if name.endswith("_ms")}
    rows = (
        ("one message", _size(MAX_MESSAGE_BYTES), "memory filled by one request; a model travels in chunks"),
        (
            "the handshake of TLS, to its end",
            f"{seconds['grpc.server_handshake_timeout_ms']} s",
            "connections that never speak, or never present a certificate",
        ),
        (
            "a connection without a call",
            f"{seconds['grpc.max_connection_idle_ms']} s",
            "connections that authenticate and do nothing",
        ),
        (
            "from the beginning of a call to its first request",
            f"{OF_ONE_CALLER.first_request_s:.0f} s",
            "calls that begin and say nothing",
        ),
        ("streams of one connection", f"{server['grpc.max_concurrent_streams']}", "streams without number"),
        (
            "open calls of one caller, over all its connections",
            f"{OF_ONE_CALLER.calls}",
            "a silo that fills the server",
        ),
        (
            "requests of one caller on their way in",
            f"{OF_ONE_CALLER.requests}",
            "beginnings of messages, which gRPC keeps until the rest has come",
        ),
        ("open calls of all strangers together (enrolment)", f"{OF_ALL_STRANGERS.calls}", "the same, by anybody"),
        ("requests of all strangers on their way in", f"{OF_ALL_STRANGERS.requests}", "the same, by anybody"),
        (
            "what a peer may send ahead on a stream",
            f"{_size(server['grpc.http2.lookahead_bytes'])}, of a stranger "
            f"{_size(strangers['grpc.http2.lookahead_bytes'])}",
            "floods that nobody reads",
        ),
        (
            "a ping without data, at most every",
            f"{seconds['grpc.http2.min_ping_interval_without_data_ms']} s, "
            f"{server['grpc.http2.max_ping_strikes']} strikes",
            "floods of pings",
        ),
        (
            "keepalive",
            f"{seconds['grpc.keepalive_time_ms']} s, answered in {seconds['grpc.keepalive_timeout_ms']} s",
            "connections whose other end has gone",
        ),
        (
            "connections to the status page, to metrics",
            f"{MAX_CONNECTIONS} each, {MAX_CONNECTIONS_OF_ONE} of one address",
            "strangers who hold descriptors; none holds a thread",
        ),
        (
            "the head of a request there, from the end of the one before",
            f"{REQUEST_S:.0f} s, {_size(MAX_HEAD_BYTES)}; a body is refused",
            "connections that say nothing, or a letter at a time",
        ),
        ("open files of the coordinator", f"{OPEN_FILES:,}, or what the system allows", "strangers who keep silos out"),
    )
    return markdown_table(("of what", "limit", "what it stops"), rows)


def _size(number: int) -> str:
    return f"{number >> 20} MiB" if number >= 1 << 20 else f"{number >> 10} KiB"


# --- what the checks find


def coordinator_mistakes() -> str:
    return _mistakes(mistake.value for mistake in CoordinatorMistake)


def silo_mistakes() -> str:
    return _mistakes(mistake.value for mistake in SiloMistake)


def _mistakes(found: Iterable[Misconfiguration]) -> str:
    rows = [(f"`{it.name}`", it.found_by, it.meaning, it.remedy) for it in found]
    return markdown_table(("name", "check", "what it is", "remedy"), rows)
