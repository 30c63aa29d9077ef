"""How the coordinator is put together: from a folder to a running federation, or to one that answers a single command."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from coordinator.edges.database.round_store import SqlRoundStore
from coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from coordinator.edges.keys.key_store import KeyStore
from coordinator.edges.models.export_scratch import ExportScratch
from coordinator.edges.models.model_store import ModelStore
from coordinator.edges.models.spool import Spools
from coordinator.edges.operator_host.operator_client import OperatorAccess
from coordinator.edges.server.audited import AuditedOperator, AuditedStore, RefusalLog, released
from coordinator.edges.server.enrolment_servicer import EnrolmentServicer
from coordinator.edges.server.federation_servicer import FederationServicer
from coordinator.edges.server.fresh_certificates import FreshCertificates
from coordinator.edges.server.gate import Refusal
from coordinator.edges.server.grpc_server import enrolment_listener, serve_while_open, silo_listener
from coordinator.edges.server.operator_servicer import OnThisHost, OperatorServicer
from coordinator.edges.server.presented import Presented
from coordinator.edges.status_page.page import status_page
from coordinator.edges.status_page.refusals import RecentRefusals
from coordinator.edges.sums.plan_parts import base_store, model_store, plan_parts
from coordinator.edges.sums.release_ledger import ReleaseLedger
from coordinator.edges.telemetry.logs import Whereabouts
from coordinator.edges.telemetry.metrics import CoordinatorMetrics
from coordinator.edges.upkeep.garbage import Collector, Garbage
from coordinator.edges.upkeep.groups_in_log import newest_groups
from coordinator.plans.plan_shelf import PlanShelf
from coordinator.service.federation import Federation
from coordinator.service.ports import Aggregator, Clock, Steady
from coordinator.service.records import PresentPlan
from coordinator.settings import Settings, reachable
from lorica_security.audit.entry import Event
from lorica_security.daemon.clock_watch import watched_clock
from lorica_security.daemon.heartbeat import beating
from lorica_security.daemon.host_metrics import register_host
from lorica_security.daemon.kept_ballast import kept_ballast
from lorica_security.daemon.listen_address import Address, address
from lorica_security.daemon.metrics_port import metrics_port
from lorica_security.daemon.sealed_log import kept_log
from lorica_security.errors import ConfigurationError, StateError, StorageError
from lorica_security.host import files
from lorica_security.identifiers import FederationName, Identity, Role
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.privacy.ledger import Entry
from lorica_security.secure_aggregation.groups.release_groups import SignedLink
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.wire_version import OURS

_log = structlog.get_logger(__name__)


def load_keys(folder: CoordinatorFolder, settings: Settings) -> KeyStore:
    """Raises ConfigurationError naming the file."""
    return KeyStore.load(
        folder.keys,
        hosts=settings.public.hosts,
        enrolment_host=settings.public.hosts[0],
        enrolment_port=settings.public_enrolment_port,
        silo_certificate_lifetime=settings.certificates.silo_lifetime,
        own_certificate_lifetime=settings.certificates.own_lifetime,
    )


@dataclass(frozen=True, slots=True)
class Coordinator:
    """A coordinator's folder with its settings and keys loaded."""

    folder: CoordinatorFolder
    settings: Settings
    keys: KeyStore

    @classmethod
    def load(cls, folder: CoordinatorFolder) -> "Coordinator":
        """Raises ConfigurationError naming the file, the key and the remedy."""
        settings = Settings.read(folder.settings)
        keys = load_keys(folder, settings)
        if keys.federation != settings.federation:
            raise ConfigurationError(
                f"{folder.settings}: federation = {settings.federation!r}, but the authority in {folder.keys} is of "
                f"{keys.federation!r}: correct the name"
            )
        return cls(folder, settings, keys)

    @property
    def federation(self) -> FederationName:
        return self.keys.federation

    @property
    def shelf(self) -> PlanShelf:
        return PlanShelf(self.settings.state_folder)

    def models(self, bundle: PlanBundle) -> ModelStore:
        """The models of one plan."""
        return model_store(self.settings.state_folder, bundle)

    def base(self, bundle: PlanBundle) -> ModelStore | None:
        """The model that the plan's adapters are for, where it has adapters."""
        return base_store(self.settings.state_folder, bundle)

    @property
    def releases(self) -> ReleaseLedger:
        """What was released under silo-level privacy, of all plans."""
        return ReleaseLedger(self.settings.state_folder / "privacy")

    def audit(self, clock: Clock = time.time) -> AuditLog:
        """The coordinator's audit log; nothing of it is read before something is entered."""
        writer = Identity(self.federation, Role.COORDINATOR).uri
        return AuditLog(self.folder.audit, writer=writer, key=self.keys.identity, clock=clock)

    def released(self) -> list[tuple[Plan, list[Entry]]]:
        """Every plan of which sums were released so, in the order of the first, with its entries."""
        of_plan: dict[str, list[Entry]] = {}
        for entry in self.releases.file.entries():
            of_plan.setdefault(entry.plan, []).append(entry)
        return [(self.shelf.bundle(Digest(plan)).plan, entries) for plan, entries in of_plan.items()]

    def epsilon_released(self, plan: Plan) -> float | None:
        """What sums with noise of the coordinator's have cost under `plan` so far; None where the noise is not its own."""
        return self.releases.spent(plan) if plan.noise_at == "coordinator" else None

    def operator_access(self) -> OperatorAccess:
        """How this host's operator reaches the coordinator that runs on this folder."""
        listening = address(self.settings.listen.silos)
        return OperatorAccess(
            address=str(Address(reachable(listening.host), listening.port)),
            federation=self.federation,
            pair=self.keys.present_operator_pair(),
            trust=self.keys.trust,
        )

    @property
    def public_address(self) -> str:
        """host:port by which silos and operators elsewhere reach this coordinator."""
        return str(Address(self.settings.public.hosts[0], self.settings.public_silos_port))

    @property
    def scratch(self) -> ExportScratch:
        return ExportScratch(self.settings.state_folder / "exports")

    @property
    def on_this_host(self) -> OnThisHost:
        scratch = self.scratch
        return OnThisHost(
            invitation_s=self.settings.invitations.validity_s,
            access_s=self.settings.certificates.access_lifetime.total_seconds(),
            address=self.public_address,
            export=self.export,
            scratch=scratch,
            collect=partial(self._collect, scratch),
        )

    def _collect(self, scratch: ExportScratch, present: PresentPlan, dry_run: bool) -> list[Garbage]:
        store = self.open_store()
        try:
            collector = Collector(self.settings.state_folder, self.settings.retention, store, scratch)
            return collector.collect(present, time.time(), dry_run=dry_run)
        finally:
            store.close()

    def export(self, plan: Digest, model: Digest, target: Path) -> None:
        """Write a model of a plan to the new folder `target`; raises StateError for one that is not in the records."""
        from coordinator.edges.models.export import export_model

        bundle = self.shelf.bundle(plan)
        store = self.open_store()
        try:
            signed = store.signed_model(plan, model)
        finally:
            store.close()
        if signed is None:
            raise StateError(
                f"model {model} is not in the records of plan {bundle.plan.name}: restore the state from backup"
            )
        export_model(bundle, self.models(bundle), model, target, base=self.base(bundle), round_number=signed.round)

    def open_store(self) -> SqlRoundStore:
        state = self.settings.state_folder
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{state} cannot be created: {error.strerror}") from error
        return SqlRoundStore(state / "state.sqlite", self.federation)

    @asynccontextmanager
    async def service(
        self, metrics: CoordinatorMetrics, *, audit: AuditLog, clock: Clock = time.time, steady: Steady = time.monotonic
    ) -> AsyncIterator[tuple[Federation, asyncio.Task[None]]]:
        """The service on this folder's state, and the task that is its loop. The caller holds the folder's lock."""
        store = self.open_store()
        try:
            spools = Spools(self.settings.state_folder / "spools")
            service = Federation(
                federation=self.federation,
                store=AuditedStore(store, audit),
                shelf=self.shelf,
                open_plan=plan_parts(
                    self.settings.state_folder, spools=spools, make_aggregator=partial(self._aggregator, audit)
                ),
                spools=spools,
                keys=self.keys,
                audit=audit,
                observer=metrics,
                clock=clock,
                steady=steady,
            )
            service.authorities.on_change.append(partial(self._authority_changed, audit))
            service.groups.on_standing.append(partial(_groups_stand, audit))
            service.groups.stood = newest_groups(audit.folder)
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

    def _authority_changed(self, audit: AuditLog) -> None:
        standings = self.keys.authorities.standings()
        audit.append(Event.AUTHORITY_CHANGED, **{f"is_{item.name.replace('-', '_')}": item.stage for item in standings})

    def _aggregator(self, audit: AuditLog, bundle: PlanBundle, models: ModelStore, spools: Spools) -> Aggregator:
        # Here, not above: torch takes seconds to import, and most commands do without it.
        import torch

        from coordinator.edges.sums import aggregator

        if self.settings.aggregation.threads:
            torch.set_num_threads(self.settings.aggregation.threads)
        device = aggregator.device_for(self.settings.aggregation.device)
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
            releases=ReleaseLedger(self.settings.state_folder / "privacy", tell=released(audit)),
        )

    def check_device(self) -> None:
        """Raises ConfigurationError now for a device that is not there, rather than at the end of the first round."""
        from coordinator.edges.sums import aggregator

        aggregator.device_for(self.settings.aggregation.device)


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
    """The service with its two listeners and its status page. The caller holds the folder's lock; `offer` as for `serve`."""
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
        coordinator.service(metrics, audit=audit, clock=clock) as (service, loop),
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
            operator_service=AuditedOperator(OperatorServicer(service, coordinator.on_this_host), audit),  # type: ignore[arg-type]  # as above
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
    """Run until SIGTERM or SIGINT. `offer` names a plan that silos prepare at once if none is under way; "" is none."""
    listen = coordinator.settings.listen
    coordinator.check_device()
    registry = CollectorRegistry()
    register_host(registry, coordinator.settings.state_folder, str(OURS))
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with (
        serving(coordinator, CoordinatorMetrics(registry), offer=offer) as at_work,
        beating(coordinator.folder.lock),
        kept_ballast(*disks(coordinator)),
        watched_clock(_clock_was_set),
        _metrics_served(coordinator, registry),
    ):
        where.of = lambda: at_work.service.place
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
            work = (at_work.door, at_work.loop, at_work.fresh)
            await asyncio.wait((stopped, *work), return_when=asyncio.FIRST_COMPLETED)
            for ended in work:
                if ended.done():
                    ended.result()  # raises why it ended: a port that cannot be bound, or a defect
        finally:
            _log.info("stopping")
            stopped.cancel()


def disks(coordinator: Coordinator) -> set[Path]:
    """The folders that are to have ballast."""
    root, state = coordinator.folder.root, coordinator.settings.state_folder
    return {root} if state.is_relative_to(root) else {root, state}


@asynccontextmanager
async def _metrics_served(coordinator: Coordinator, registry: CollectorRegistry) -> AsyncIterator[None]:
    """Raises ConfigurationError where the address cannot be bound."""
    settings = coordinator.settings
    async with AsyncExitStack() as open_here:
        served = metrics_port(address(settings.listen.metrics), registry, hosts=settings.public.hosts)
        try:
            await open_here.enter_async_context(served)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {settings.listen.metrics} for metrics ({error.strerror}): change [listen] metrics in "
                f"{coordinator.folder.settings}"
            ) from error
        yield


def _groups_stand(audit: AuditLog, signed: SignedLink) -> None:
    link = signed.link
    groups = "; ".join(", ".join(group) for group in link.partition.groups)
    audit.append(Event.GROUPS_STAND, number=link.number, digest=link.digest.hex(), groups=groups)
