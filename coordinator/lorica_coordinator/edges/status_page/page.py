"""The page itself: what it gathers from the service, how it is rendered, and what each path answers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Final

import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined

from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.server.gate import DEFECT, Refusal
from lorica_coordinator.edges.server.presented import Presented
from lorica_coordinator.edges.status_page import charts
from lorica_coordinator.edges.status_page.entrance import (
    BehindTls,
    Entrance,
    OnLoopback,
    read_token,
    tls_context,
)
from lorica_coordinator.edges.status_page.refusals import RecentRefusals
from lorica_coordinator.edges.status_page.view import PageView, page_view
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.ports import Clock
from lorica_coordinator.settings import Settings
from lorica_security.daemon.http_hosts import LOOPBACK_NAMES, AnotherHost
from lorica_security.daemon.http_server import HttpServer, Request, Response
from lorica_security.daemon.listen_address import Address, address, is_loopback
from lorica_security.errors import AuthenticationError, AuthorisationError, ConfigurationError, LoricaError, kind_of
from silo_wire.plans.plan import Plan

MOST_ROUNDS: Final = 200
FRESH_S: Final = 1.0
"""However many look, the service is asked once in this time."""
CALL: Final = "status page"
_STATIC: Final = {
    "/page.css": "text/css; charset=utf-8",
    "/page.js": "text/javascript; charset=utf-8",
    "/icon.svg": "image/svg+xml",
}
_HTML: Final = "text/html; charset=utf-8"
_log = structlog.get_logger(__name__)


class StatusPage:
    """`answer` for each request; `epsilon` says what the coordinator's own releases under a plan have cost, None where
    silos know."""

    def __init__(
        self,
        *,
        service: Federation,
        keys: KeyStore,
        presented: Presented,
        refusals: RecentRefusals,
        on_refused: Callable[[Refusal], None],
        entrance: Entrance,
        epsilon: Callable[[Plan], float | None],
        clock: Clock,
    ) -> None:
        self._service, self._keys, self._presented = service, keys, presented
        self._refusals, self._on_refused = refusals, on_refused
        self._entrance, self._epsilon, self._clock = entrance, epsilon, clock
        self._static = {path: _static(path) for path in _STATIC}
        templates = Environment(
            loader=PackageLoader("lorica_coordinator.edges.status_page"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._page = templates.get_template("page.html.j2")
        self._live = templates.get_template("live.html.j2")
        self._gathering = asyncio.Lock()
        self._gathered: tuple[float, PageView] | None = None

    async def answer(self, request: Request) -> Response:
        """Never raises, but for cancellation."""
        try:
            self._entrance.require(request)
            return await self._answer(request.path)
        except AnotherHost as error:
            return self._refuse(request, error, HTTPStatus.MISDIRECTED_REQUEST)
        except AuthorisationError as error:
            return self._refuse(request, error, HTTPStatus.FORBIDDEN)
        except AuthenticationError as error:
            ask = (
                "WWW-Authenticate",
                'Basic realm="Lorica status page: any name, the token as password", charset="UTF-8"',
            )
            return self._refuse(request, error, HTTPStatus.UNAUTHORIZED, ask)
        except LoricaError as error:
            _log.error("status page cannot be made", kind=kind_of(error).__name__, error=str(error))
            return Response.of(HTTPStatus.SERVICE_UNAVAILABLE, "the coordinator's state cannot be read: see its log")
        except Exception as error:  # noqa: BLE001  # the last place where a defect can be kept from whoever looks
            _log.error("defect", method=CALL, exc_info=error)
            self._on_refused(Refusal(kind=DEFECT, method=CALL, peer=request.source, detail="see the coordinator's log"))
            return Response.of(HTTPStatus.INTERNAL_SERVER_ERROR)

    def _refuse(self, request: Request, error: LoricaError, status: HTTPStatus, *headers: tuple[str, str]) -> Response:
        kind = kind_of(error).__name__
        _log.warning("page refused", peer=request.source, kind=kind, error=str(error))
        self._on_refused(Refusal(kind=kind, method=CALL, peer=request.source, detail=str(error)))
        return Response.of(status, str(error), *headers)

    async def _answer(self, path: str) -> Response:
        if path in self._static:
            return Response(content_type=_STATIC[path], body=self._static[path])
        template = {"/": self._page, "/live": self._live}.get(path)
        if template is None:
            return Response.of(HTTPStatus.NOT_FOUND)
        view = await self._view()
        text = await asyncio.to_thread(template.render, view=view, charts=charts)
        return Response(content_type=_HTML, body=text.encode())

    async def _view(self) -> PageView:
        async with self._gathering:
            now = self._clock()
            if self._gathered is None or not 0 <= now - self._gathered[0] < FRESH_S:
                self._gathered = now, await self._gather(now)
            return self._gathered[1]

    async def _gather(self, now: float) -> PageView:
        plan = await self._service.plan()
        return page_view(
            standing=await self._service.status(),
            rows=await self._service.rounds(MOST_ROUNDS),
            plan=plan,
            epsilon=None if plan is None else await asyncio.to_thread(self._epsilon, plan),
            groups=self._service.groups.as_it_stands(),
            refusals=self._refusals.newest_first(),
            authorities=self._keys.authorities.standings(),
            own_certificate_expires=self._presented.pair.expires.timestamp(),
            now=now,
        )


def _static(path: str) -> bytes:
    return (files("lorica_coordinator.edges.status_page") / "static" / path.removeprefix("/")).read_bytes()


@asynccontextmanager
async def status_page(
    settings: Settings,
    *,
    service: Federation,
    keys: KeyStore,
    presented: Presented,
    refusals: RecentRefusals,
    on_refused: Callable[[Refusal], None],
    epsilon: Callable[[Plan], float | None],
    clock: Clock,
) -> AsyncIterator[Address | None]:
    """The page at `[listen] status`, and where that is; None where there is none.

    Raises ConfigurationError for an address that cannot be bound, a token that is none, or one that nobody would be
    asked for.
    """
    if not settings.listen.status:
        yield None
        return
    at = address(settings.listen.status)
    token = settings.listen.status_token_file
    entrance: Entrance = OnLoopback()
    context = None
    if is_loopback(at.host):
        if token:
            raise ConfigurationError(
                f"[listen] status_token_file is set and status = {settings.listen.status} is on loopback, where "
                "everybody on this "
                'host reads the page and nobody is asked for a token: set status_token_file = "", or listen on '
                "another address"
            )
    else:
        entrance = BehindTls(
            federation=keys.federation,
            trust=lambda: presented.trust,
            registered=service.register.require,
            hosts=frozenset(name.lower() for name in (*settings.public.hosts, *LOOPBACK_NAMES, at.host)),
            token=read_token(Path(token)) if token else None,
        )
        context = tls_context(presented, token=bool(token))
    page = StatusPage(
        service=service,
        keys=keys,
        presented=presented,
        refusals=refusals,
        on_refused=on_refused,
        entrance=entrance,
        epsilon=epsilon,
        clock=clock,
    )
    server = HttpServer(page.answer, CALL)
    try:
        where = await server.start(at, context)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {settings.listen.status} for the status page ({error.strerror or error}): change "
            "[listen] status in "
            'federation.toml, or set it to "" for none'
        ) from error
    try:
        yield where
    finally:
        await server.stop()
