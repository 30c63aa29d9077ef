"""The page itself: what it gathers from the service, how it is rendered, and what each path answers."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Final

import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.server.gate import DEFECT, Refusal
from lorica_coordinator.edges.server.presented import Presented
from lorica_coordinator.edges.status_page.curves import all_plans_json, curves_json
from lorica_coordinator.edges.status_page.entrance import (
    BehindTls,
    Entrance,
    OnLoopback,
    read_token,
    tls_context,
)
from lorica_coordinator.edges.status_page.histories import Histories, PlanHistory
from lorica_coordinator.edges.status_page.refusals import RecentRefusals
from lorica_coordinator.edges.status_page.rounds_log import round_entries
from lorica_coordinator.edges.status_page.view import PageView, page_view
from lorica_coordinator.service.callers.lookers import RecordedPlan
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.ports import Clock
from lorica_coordinator.settings import Settings
from lorica_security.daemon.http_hosts import LOOPBACK_NAMES, AnotherHost
from lorica_security.daemon.http_server import HttpServer, Request, Response
from lorica_security.daemon.listen_address import Address, address, is_loopback
from lorica_security.errors import AuthenticationError, AuthorisationError, ConfigurationError, LoricaError, kind_of
from lorica_security.host.software_version import software_version
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan
from silo_wire.wire_version import OURS

FRESH_S: Final = 1.0
"""However many look, the service is asked once in this time."""
ATTEMPTS_OF_A_ROUND: Final = 16
"""On its own page: the first one, and the newest."""
MOST_CURVES: Final = 4
"""Plans whose curves of silos are kept from one look to the next."""
MOST_CURVES_BYTES: Final = 16 << 20
"""Of all of them together."""
CALL: Final = "status page"
_STATIC: Final = {
    "/page.css": "text/css; charset=utf-8",
    "/page.js": "text/javascript; charset=utf-8",
    "/charts.js": "text/javascript; charset=utf-8",
    "/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "/uPlot.min.css": "text/css; charset=utf-8",
    "/uPlot.LICENSE.txt": "text/plain; charset=utf-8",
    "/icon.svg": "image/svg+xml",
    "/runbook.html": "text/html; charset=utf-8",
}
_HTML: Final = "text/html; charset=utf-8"
_JSON: Final = "application/json"
_OF_NOW: Final = {"/": _HTML, "/live": _HTML, "/curves": _JSON}
_OF_A_PLAN: Final = re.compile(r"/(?P<what>log|curves)/(?P<plan>[0-9a-f]{64})")
_OF_A_ROUND: Final = re.compile(r"/log/(?P<plan>[0-9a-f]{64})/(?P<round>[0-9]{1,7})")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one look at the service came to; `bodies` are the answers that were made of it, by path."""

    at: float
    view: PageView
    histories: tuple[PlanHistory, ...]
    bodies: dict[str, bytes] = field(default_factory=dict)


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
        self._log = templates.get_template("log.html.j2")
        self._round = templates.get_template("round.html.j2")
        self._product = f"Lorica {software_version()}, wire {OURS}"
        self._histories = Histories(service)
        self._looking = asyncio.Lock()
        self._seen: _Look | None = None
        self._curves: dict[Digest, tuple[str, bytes]] = {}
        """By plan, the curves of its silos as they were made last, with what they were made of; the newest last."""

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
        if path in _OF_NOW:
            return Response(content_type=_OF_NOW[path], body=await self._of_now(path))
        if (asked := _OF_A_PLAN.fullmatch(path)) is not None:
            return await self._of_plan(asked["what"], Digest(asked["plan"]))
        if (asked := _OF_A_ROUND.fullmatch(path)) is not None:
            return await self._of_round(Digest(asked["plan"]), int(asked["round"]))
        return Response.of(HTTPStatus.NOT_FOUND)

    async def _of_now(self, path: str) -> bytes:
        """Made once of each look, by whoever asks first."""
        async with self._looking:
            look = await self._look()
            if path not in look.bodies:
                look.bodies[path] = await asyncio.to_thread(self._made, path, look)
            return look.bodies[path]

    def _made(self, path: str, look: _Look) -> bytes:
        if path == "/curves":
            return all_plans_json((history.plan, history.pieces) for history in look.histories)
        return (self._page if path == "/" else self._live).render(view=look.view).encode()

    async def _of_plan(self, what: str, digest: Digest) -> Response:
        """Of a plan that the page lists, made once of each look."""
        async with self._looking:
            look = await self._look()
            if (plan := _listed(look, digest)) is None:
                return Response.of(HTTPStatus.NOT_FOUND)
            path, content_type = f"/{what}/{digest}", _JSON if what == "curves" else _HTML
            if path not in look.bodies:
                history = await self._histories.of(plan)
                made = self._curves_of(history) if what == "curves" else self._log_of(look, history)
                look.bodies[path] = await made
            return Response(content_type=content_type, body=look.bodies[path])

    async def _log_of(self, look: _Look, history: PlanHistory) -> bytes:
        values = {"view": look.view, "plan": history.plan, "lines": history.lines[::-1], "read": history.read}
        return await self._rendered(self._log, **values)

    async def _curves_of(self, history: PlanHistory) -> bytes:
        """From one look to the next, too, as long as nothing of them is another."""
        digest, version = history.plan.digest, f"{history.version} {history.plan.score}"
        kept = self._curves.get(digest)
        if kept is not None and kept[0] == version:
            return kept[1]
        self._curves.pop(digest, None)  # what is made anew is the newest
        body = await asyncio.to_thread(curves_json, history.plan, history.silos, history.curves)
        self._curves[digest] = version, body
        while (
            len(self._curves) > MOST_CURVES or sum(len(body) for _, body in self._curves.values()) > MOST_CURVES_BYTES
        ):
            del self._curves[next(iter(self._curves))]
        return body

    async def _of_round(self, digest: Digest, number: int) -> Response:
        async with self._looking:
            look = await self._look()
            if (plan := _listed(look, digest)) is None:
                return Response.of(HTTPStatus.NOT_FOUND)
            rows = await self._service.rounds_of(digest, since=number, until=number, attempts=ATTEMPTS_OF_A_ROUND)
            entries = round_entries(rows[::-1], single=plan.shows_single_silos)
            values = {"view": look.view, "plan": plan, "number": number, "entries": entries}
            return Response(content_type=_HTML, body=await self._rendered(self._round, **values))

    async def _rendered(self, template: Template, **values: object) -> bytes:
        return (await asyncio.to_thread(template.render, **values)).encode()

    async def _look(self) -> _Look:
        """The caller holds the lock."""
        now = self._clock()
        if self._seen is None or not 0 <= now - self._seen.at < FRESH_S:
            self._seen = await self._gather(now)
        return self._seen

    async def _gather(self, now: float) -> _Look:
        plan = await self._service.plan()
        histories = await self._histories.look()
        view = page_view(
            product=self._product,
            standing=await self._service.status(),
            histories=histories,
            left_out=self._histories.left_out,
            plan=plan,
            epsilon=None if plan is None else await asyncio.to_thread(self._epsilon, plan),
            groups=self._service.groups.as_it_stands(),
            refusals=self._refusals.newest_first(),
            authorities=self._keys.authorities.standings(),
            own_certificate_expires=self._presented.pair.expires.timestamp(),
            now=now,
        )
        return _Look(now, view, histories)


def _listed(look: _Look, digest: Digest) -> RecordedPlan | None:
    return next((history.plan for history in look.histories if history.plan.digest == digest), None)


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
