"""How the coordinator is put together: from a folder to a running federation, or to one that answers a single
command."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

import structlog
from prometheus_client import CollectorRegistry

from lorica_coordinator.edges.kept.kept_in_bucket import KeptInBucket
from lorica_coordinator.edges.models.export_scratch import ExportScratch
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.server.audited import AuditedOperator, AuditedStore, RefusalLog
from lorica_coordinator.edges.server.enrolment_servicer import EnrolmentServicer
from lorica_coordinator.edges.server.federation_servicer import FederationServicer
from lorica_coordinator.edges.server.fresh_certificates import FreshCertificates
from lorica_coordinator.edges.server.gate import Refusal
from lorica_coordinator.edges.server.grpc_server import enrolment_listener, serve_while_open, silo_listener
from lorica_coordinator.edges.server.operator_servicer import OnThisHost, OperatorServicer
from lorica_coordinator.edges.server.presented import Presented
from lorica_coordinator.edges.status_page.page import status_page
from lorica_coordinator.edges.status_page.refusals import RecentRefusals
from lorica_coordinator.edges.sums.plan_parts import plan_parts
from lorica_coordinator.edges.telemetry.leadership_metrics import LeadershipCollector, Standing
from lorica_coordinator.edges.telemetry.logs import Whereabouts
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_coordinator.edges.upkeep.authorities_in_log import in_entry, require_newest
from lorica_coordinator.edges.upkeep.garbage import Collector, Garbage
from lorica_coordinator.edges.upkeep.newest_in_log import newest_groups, newest_told
from lorica_coordinator.opened import Coordinator, disks, with_ballast
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.ports import Aggregator, Clock, Steady
from lorica_coordinator.service.records import PresentPlan
from lorica_security.audit.entry import Event
from lorica_security.daemon.clock_watch import watched_clock
from lorica_security.daemon.heartbeat import beating
from lorica_security.daemon.host_metrics import register_host
from lorica_security.daemon.kept_ballast import kept_ballast
from lorica_security.daemon.listen_address import Address, address, require_bindable
from lorica_security.daemon.metrics_port import metrics_port
from lorica_security.daemon.sealed_log import kept_log
from lorica_security.errors import ConfigurationError
from lorica_security.host import files
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.secure_aggregation.groups.release_groups import SignedLink
from silo_wire.plans.plan import PlanBundle
from silo_wire.wire_version import OURS

_log = structlog.get_logger(__name__)


@asynccontextmanager
async def service_of(
    coordinator: Coordinator,
    metrics: CoordinatorMetrics,
    *,
    audit: AuditLog,
    clock: Clock = time.time,
    steady: Steady = time.monotonic,
) -> AsyncIterator[tuple[Federation, asyncio.Task[None]]]:
    """The service on this folder's state, and the task that is its loop. The caller holds the folder's lock.

    Raises ConfigurationError where the folder's authorities are older than what its log tells.
    """
    told_last = newest_told(audit.place)
    if coordinator.settings.storage.database:  # once more: who led until this one's term may have changed them
        require_newest(told_last, coordinator.keys.authorities, coordinator.folder.keys)
    store = coordinator.open_store()
    try:
        spools = coordinator.spools
        service = Federation(
            federation=coordinator.federation,
            store=AuditedStore(store, audit),
            shelf=coordinator.shelf,
            open_plan=plan_parts(
                coordinator.settings.state_folder,
                spools=spools,
                make_aggregator=partial(_aggregator, coordinator, audit),
                releases=coordinator.releases,
                kept=coordinator.kept,
            ),
            spools=spools,
            keys=coordinator.keys,
            audit=audit,
            observer=metrics,
            clock=clock,
            steady=steady,
        )
        service.authorities.on_change.append(partial(_authority_changed, coordinator, audit))
        service.groups.on_standing.append(partial(_groups_stand, audit))
        service.groups.stood = newest_groups(told_last)
        await service.start()
        loop = asyncio.create_task(service.run())
        try:
            yield service, loop
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)
            await service.end()
    finally:
        store.close()


def _authority_changed(coordinator: Coordinator, audit: AuditLog) -> None:
    audit.append(Event.AUTHORITY_CHANGED, **in_entry(coordinator.keys.authorities.standings()))


def _aggregator(
    coordinator: Coordinator, audit: AuditLog, bundle: PlanBundle, models: ModelStore, spools: Spools
) -> Aggregator:
    # Here, not above: torch takes seconds to import, and most commands do without it.
    import torch

    from lorica_coordinator.edges.sums import aggregator

    if coordinator.settings.aggregation.threads:
        torch.set_num_threads(coordinator.settings.aggregation.threads)
    device = aggregator.device_for(coordinator.settings.aggregation.device)
    if bundle.plan.aggregation.secure_aggregation:
        device = torch.device(
            "cpu"
        )  # silos make the step again, on theirs: that a GPU's has the same bits is not shown
    return aggregator.Aggregator(
        bundle.plan.aggregation,
        models=models,
        spools=spools,
        update_dtype=bundle.plan.wire.update,
        device=device,
        training=bundle.plan.training,
        privacy=bundle.plan.privacy,
        releases=coordinator.releases_told(audit),
        turns=bundle.turns,
        reprojected=bundle.reprojected,
        rates=bundle.plan.server_rates,
    )


def load_libraries() -> None:
    """Import what serving needs and most commands do not."""
    from lorica_coordinator.edges.sums import aggregator  # noqa: F401


def require_servable(coordinator: Coordinator) -> None:
    """Raises ConfigurationError for a device that is not there, rather than at the end of the first round, and for an
    address that another process has, rather than once this one leads."""
    from lorica_coordinator.edges.sums import aggregator

    aggregator.device_for(coordinator.settings.aggregation.device)
    listen = coordinator.settings.listen
    for key, place in (("silos", listen.silos), ("enrolment", listen.enrolment), ("status", listen.status)):
        try:
            if place:
                require_bindable(address(place))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {place} ({error.strerror}): stop what does, or change [listen] {key} in "
                f"{coordinator.folder.settings}"
            ) from error


def on_this_host(coordinator: Coordinator) -> OnThisHost:
    """What the operator's calls need of the folder itself."""
    scratch = coordinator.scratch
    return OnThisHost(
        invitation_s=coordinator.settings.invitations.validity_s,
        access_s=coordinator.settings.certificates.access_lifetime.total_seconds(),
        address=coordinator.public_address,
        export=coordinator.export,
        scratch=scratch,
        collect=partial(_collect, coordinator, scratch),
    )


def _collect(coordinator: Coordinator, scratch: ExportScratch, present: PresentPlan, dry_run: bool) -> list[Garbage]:
    store = coordinator.open_store()
    try:
        collector = Collector(
            coordinator.settings.state_folder,
            coordinator.settings.retention,
            store,
            scratch,
            spool_keys=coordinator.spool_keys,
            kept=coordinator.kept,
        )
        return collector.collect(present, time.time(), dry_run=dry_run)
    finally:
        store.close()


@asynccontextmanager
async def offline_operator(coordinator: Coordinator) -> AsyncIterator[AuditedOperator]:
    """The operator's calls on a folder whose coordinator does not run. The caller holds the folder's lock."""
    audit = coordinator.audit()
    async with service_of(coordinator, CoordinatorMetrics(CollectorRegistry()), audit=audit) as (service, _):
        try:
            yield AuditedOperator(OperatorServicer(service, on_this_host(coordinator)), audit)
        finally:
            audit.seal()


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A coordinator at work; its tasks run until they are cancelled, and end otherwise only with what went wrong."""

    service: Federation
    loop: asyncio.Task[None]
    door: asyncio.Task[None]
    fresh: asyncio.Task[None]
    page: Address | None


@asynccontextmanager
async def serving(
    coordinator: Coordinator, metrics: CoordinatorMetrics, *, offer: str = "", clock: Clock = time.time
) -> AsyncIterator[Serving]:
    """The service with its two listeners and its status page. The caller holds the folder's lock; `offer` as for
    `serve`."""
    settings = coordinator.settings
    keys = coordinator.keys
    keys.authorities.tidy()
    for folder in disks(coordinator):
        files.sweep(folder)
    coordinator.scratch.clear()
    presented = Presented(keys.server_pair(datetime.now(UTC)), keys.trust)
    audit = coordinator.audit(clock)
    refusals, recent = RefusalLog(audit, clock), RecentRefusals(clock)

    def refused(refusal: Refusal) -> None:
        metrics.refused(refusal.kind)
        refusals.refused(refusal)
        recent.add(refusal)

    async with (
        kept_log(audit, refusals, _complain),
        service_of(coordinator, metrics, audit=audit, clock=clock) as (service, loop),
        status_page(
            settings,
            service=service,
            keys=keys,
            presented=presented,
            refusals=recent,
            on_refused=refused,
            epsilon=coordinator.epsilon_released,
            clock=clock,
        ) as page,
    ):
        now = datetime.now(UTC)
        await service.register.add(keys.operator_pair(now).entry(now))  # of this host's own commands

        if offer:
            await service.offer_plan(offer)
        federation = FederationServicer(
            service, coordinator.federation, on_sent=metrics.sent.inc, on_received=metrics.received.inc
        )
        metrics.depths(events=lambda: service.waiting_events, transfers=lambda: federation.transfers)
        silos = silo_listener(
            settings.listen.silos,
            presented=presented,
            federation=coordinator.federation,
            register=service.register,
            held=service.held,
            on_refused=refused,
            federation_service=federation,
            operator_service=AuditedOperator(OperatorServicer(service, on_this_host(coordinator)), audit),  # type: ignore[arg-type]  # as above
        )
        enrolment = enrolment_listener(
            settings.listen.enrolment,
            presented=presented,
            on_refused=refused,
            enrolment_service=EnrolmentServicer(service.enrolment, coordinator.federation, coordinator.public_address),
        )
        enrolment.require_free()  # it listens only when somebody is invited, which is too late to find out
        service.enrolment.listening.clear()
        await silos.start()
        fresh = FreshCertificates(keys=keys, service=service, metrics=metrics, presented=presented)
        tasks = {
            "door": asyncio.create_task(serve_while_open(service.enrolment, enrolment)),
            "fresh": asyncio.create_task(fresh.run()),
        }
        try:
            yield Serving(service=service, loop=loop, page=page, **tasks)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            await enrolment.stop()
            await silos.stop()


def _clock_was_set(by_s: float) -> None:
    _log.warning("the clock was set", by_s=round(by_s), detail="deadlines do not go by it; certificates and dates do")


def _complain(error: Exception) -> None:
    _log.error("the audit log cannot be added to", error=str(error) or repr(error))


async def serve(coordinator: Coordinator, *, offer: str, ready: Callable[[], None], where: Whereabouts) -> None:
    """Run until SIGTERM or SIGINT. `offer` names a plan that silos prepare at once if none is under way; "" is none.
    `require_servable` was asked."""
    listen = coordinator.settings.listen
    registry = CollectorRegistry()
    register_host(registry, coordinator.settings.state_folder, str(OURS))
    metrics = CoordinatorMetrics(registry)
    if isinstance(coordinator.kept, KeptInBucket):
        coordinator.kept.tell(metrics.bucket_called)
    if (leadership := coordinator.leadership) is not None:
        registry.register(LeadershipCollector(lambda: Standing(leadership.leads, leadership.term, leadership.standbys)))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with (
        serving(coordinator, metrics, offer=offer) as at_work,
        beating(coordinator.folder.lock, coordinator.start),
        kept_ballast(*with_ballast(coordinator)),
        watched_clock(_clock_was_set),
        _metrics_served(coordinator, registry),
    ):
        where.of = lambda: at_work.service.place
        led = asyncio.create_task(_keep_leading(coordinator))
        stopped = asyncio.create_task(stop.wait())
        try:
            _log.info(
                "serving",
                silos=listen.silos,
                enrolment=listen.enrolment,
                metrics=listen.metrics,
                status=str(at_work.page or ""),
            )
            ready()
            work = (led, at_work.door, at_work.loop, at_work.fresh)
            await asyncio.wait((stopped, *work), return_when=asyncio.FIRST_COMPLETED)
            for ended in work:
                if ended.done():
                    ended.result()  # raises why it ended: a port that cannot be bound, or a defect
        finally:
            _log.info("stopping")
            stopped.cancel()
            led.cancel()


async def _keep_leading(coordinator: Coordinator) -> None:
    """For as long as this process leads, where the database elects; raises why it does no more."""
    if coordinator.leadership is None:
        await asyncio.Event().wait()
    else:
        await asyncio.shield(asyncio.wrap_future(coordinator.leadership.ended))


@asynccontextmanager
async def _metrics_served(coordinator: Coordinator, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Raises ConfigurationError where the address cannot be bound."""
    settings = coordinator.settings
    async with AsyncExitStack() as open_here:
        leadership = coordinator.leadership
        served = metrics_port(
            address(settings.listen.metrics),
            registry,
            hosts=settings.public.hosts,
            ready=lambda: leadership is None or leadership.leads,
        )
        try:
            await open_here.enter_async_context(served)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {settings.listen.metrics} for metrics ({error.strerror}): change [listen] "
                f"metrics in {coordinator.folder.settings}"
            ) from error
        yield


def _groups_stand(audit: AuditLog, signed: SignedLink) -> None:
    link = signed.link
    groups = "; ".join(", ".join(group) for group in link.partition.groups)
    audit.append(Event.GROUPS_STAND, number=link.number, digest=link.digest.hex(), groups=groups)
