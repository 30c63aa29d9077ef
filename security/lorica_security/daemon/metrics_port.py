"""The metrics of either program over HTTP: on the bounded server, to whoever names this machine, one answer being made
at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus
from ipaddress import ip_address

import structlog
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from lorica_security.daemon.http_hosts import LOOPBACK_NAMES, AnotherHost, require_host
from lorica_security.daemon.http_server import HttpServer, Request, Response
from lorica_security.daemon.listen_address import Address

PATH = "/metrics"
READY = "/ready"
_log = structlog.get_logger(__name__)


class _Metrics:
    def __init__(
        self, registry: CollectorRegistry, names: frozenset[str], ready: Callable[[], bool] | None, *, any_address: bool
    ) -> None:
        self._registry, self._names, self._ready, self._any_address = registry, names, ready, any_address
        self._making = asyncio.Lock()

    async def answer(self, request: Request) -> Response:
        try:
            require_host(request.host, self._names, any_address=self._any_address)
        except AnotherHost as error:
            _log.warning("metrics refused", peer=request.source, error=str(error))
            return Response.of(HTTPStatus.MISDIRECTED_REQUEST, str(error))
        if request.path == READY and self._ready is not None:
            ready = self._ready()
            return Response.of(HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, "yes" if ready else "no")
        if request.path != PATH:
            return Response.of(HTTPStatus.NOT_FOUND, f"metrics are at {PATH}")
        async with self._making:
            text = await asyncio.to_thread(generate_latest, self._registry)
        return Response(content_type=CONTENT_TYPE_PLAIN_0_0_4, body=text)


@asynccontextmanager
async def metrics_port(
    at: Address,
    registry: CollectorRegistry,
    *,
    hosts: Iterable[str] = (),
    ready: Callable[[], bool] | None = None,
) -> AsyncIterator[Address]:
    """`registry` at /metrics of `at` while inside; where that is, with the port that it got. Raises OSError when `at`
    cannot be bound.

    Served for the names of loopback, for `at` and for `hosts`; on all addresses for any address as well, since no name
    was pointed there. /ready answers 200 where `ready`, else 503; without `ready` there is none.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series more for each counter, whose value is when this program began
    names = frozenset(name.lower() for name in (*LOOPBACK_NAMES, at.host, *hosts))
    server = HttpServer(_Metrics(registry, names, ready, any_address=_is_wildcard(at.host)).answer, "metrics")
    try:
        yield await server.start(at, None)
    finally:
        await server.stop()


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False
