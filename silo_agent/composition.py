"""One agent, put together from its parts: the client, what it is audited by, what it trains with, what keeps it
fresh."""

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from dataclasses import dataclass

from cryptography import x509
from rich.console import Console

from lorica_security.audit.entry import Event
from lorica_security.console.terminal import terminal
from lorica_security.daemon.clock_watch import watched_clock
from lorica_security.daemon.heartbeat import beating
from lorica_security.daemon.kept_ballast import kept_ballast
from lorica_security.daemon.listen_address import address, is_loopback
from lorica_security.daemon.sealed_log import kept_log
from lorica_security.errors import LoricaError
from lorica_security.host.software_version import software_version
from lorica_security.on_disk.log_file import AuditLog
from silo_agent.edges.accounts.audit_log import audit_log
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.accounts.shared_budget import SharedBudget, sharing_of
from silo_agent.edges.console.display import LogDisplay, TerminalDisplay
from silo_agent.edges.console.logs import Whereabouts
from silo_agent.edges.console.metrics import SiloMetrics, metrics_served
from silo_agent.edges.console.observer import SiloObserver
from silo_agent.edges.disk.answers_right import NOTE, AnswersRight, answers_right
from silo_agent.edges.disk.instance import next_instance
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import ReleaseGroups, group_chain
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.keys.own_entropy import own_entropy
from silo_agent.edges.masks.masking_party import party_of
from silo_agent.edges.masks.model_checking import model_checks
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.edges.personal.own_scores import own_scores
from silo_agent.edges.personal.personal_keeper import QUIET_S, PersonalKeeper
from silo_agent.edges.ranks.launching import check_launch
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.calls.repeated_calls import Traffic
from silo_agent.edges.wire.certificate import SiloCertificate
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_agent.edges.workshop.late_workshop import LateWorkshop
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.agent import AgentService
from silo_agent.service.audited import AuditedCoordinator, AuditedGate, AuditedObserver, SiloAudit
from silo_agent.service.certificate_keeper import CertificateKeeper
from silo_agent.service.group_keeper import GroupKeeper
from silo_agent.service.masking import Masking
from silo_agent.service.ports import Answers, OnAnswers, TrainerPort
from silo_agent.service.privacy import NotShared
from silo_agent.settings import Settings
from silo_wire.canonical import Digest

MOST_RENEWAL_WAIT_S = 300.0
"""Between two tries to renew the certificate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What an agent stands on. The caller holds the folder's lock; `sharing` says who else trains on these records."""

    folder: SiloFolder
    credentials: SiloCredentials
    settings: Settings
    policy: SiloPolicy
    sources: SiloSources
    journal: RoundJournal
    sharing: SharedBudget | NotShared


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """By which people see what the agent does: metrics, display, the audit log, and the observer that tells all
    three."""

    metrics: SiloMetrics
    display: TerminalDisplay | LogDisplay
    log: AuditLog
    audit: SiloAudit
    observer: AuditedObserver


async def run_agent(
    folder: SiloFolder,
    credentials: SiloCredentials,
    settings: Settings,
    *,
    policy: SiloPolicy,
    sources: SiloSources,
    journal: RoundJournal,
    where: Whereabouts,
) -> None:
    """Until SIGTERM or SIGINT; SIGHUP makes it read its journal and its groups again. Raises what ended it."""
    sources.data()  # bad data ends the command here, before anything heavy is loaded
    console = terminal(stderr=True)
    async with metrics_served(settings.metrics.listen, folder.root) as metrics:
        with TerminalDisplay(console) if _is_watched(console) else LogDisplay(where) as display:
            ground = Ground(
                folder=folder,
                credentials=credentials,
                settings=settings,
                policy=policy,
                sources=sources,
                journal=journal,
                sharing=sharing_of(folder, settings.policy.shared_budget),
            )
            personal = _personal_keeper(ground, display)
            if personal is not None and _is_loopback(settings.metrics.listen):
                metrics.model_scores(lambda: _model_scores(folder))
            told = _told_of_answers(ground, metrics if _is_loopback(settings.metrics.listen) else None, display)
            with ExitStack() as ends:
                trainer = _trainer(ground, told, ends)
                await _serve(ground, _watched(ground, metrics, display, personal), trainer, personal)


def _personal_keeper(ground: Ground, display: TerminalDisplay | LogDisplay) -> PersonalKeeper | None:
    settings = ground.settings.personal
    if settings.method == "none":
        return None

    def told(event: str, detail: str) -> None:
        display.note(event, detail=detail)

    return PersonalKeeper(ground.folder, ground.journal, settings=settings, told=told, quiet_s=QUIET_S)


def _model_scores(folder: SiloFolder) -> Mapping[str, Mapping[str, float]]:
    try:
        return own_scores(folder.personal).read().numbers
    except LoricaError:  # whoever asks for metrics is not who mends it
        return {}


def _is_loopback(listen: str) -> bool:
    return bool(listen) and is_loopback(address(listen).host)


def _told_of_answers(ground: Ground, metrics: SiloMetrics | None, display: TerminalDisplay | LogDisplay) -> OnAnswers:
    """Who hears how many of a global model's answers are right in part: `status`, by a file, the display, and metrics
    that nobody else can read. What cannot be written ends no evaluation."""
    record = answers_right(ground.folder.answers_right)
    if metrics is not None:
        with suppress(LoricaError):  # the next evaluation replaces it
            metrics.answers(record.read().of_plan(ground.journal.fact("plan")).shares)

    def told(plan: Digest, answers: Answers) -> None:
        known = AnswersRight()
        if len(answers.right) > 1:
            known = AnswersRight(plan=plan, model=answers.model, questions=answers.questions, right=dict(answers.right))
            display.note(NOTE, questions=known.questions, **known.right)
        if metrics is not None:
            metrics.answers(known.shares)
        try:
            record.change(lambda _: known, make=False)
        except LoricaError as error:
            display.note("answers-right-not-written", detail=str(error))

    return told


def _trainer(ground: Ground, on_answers: OnAnswers, ends: ExitStack) -> TrainerPort:
    entropy = own_entropy(ground.folder.own_entropy)
    training = ground.settings.training
    check_launch(training)

    def make() -> TrainerPort:
        # Here, not above: torch takes seconds to import.
        from silo_agent.edges.workshop.workshop import Workshop

        own = Workshop(
            settings=ground.settings,
            policy=ground.policy,
            sources=ground.sources,
            own_entropy=entropy,
            on_private_data=ground.sharing.register,
            on_answers=on_answers,
        )
        if not training.processes:
            return own
        from silo_agent.edges.ranks.rank_trainer import RankTrainer

        together = RankTrainer(
            own,
            settings=ground.settings,
            policy=ground.policy,
            folder=ground.folder.ranks,
            entropy=ground.folder.own_entropy,
        )
        ends.callback(together.close)
        return together

    return LateWorkshop(make)


def _watched(
    ground: Ground, metrics: SiloMetrics, display: TerminalDisplay | LogDisplay, personal: PersonalKeeper | None
) -> Watched:
    log = audit_log(ground.folder, ground.credentials)
    audit = SiloAudit(
        log,
        federation=ground.credentials.federation,
        silo=ground.credentials.silo,
        ledger_head=ground.journal.ledger_head,
        clock=time.time,
    )
    observer = SiloObserver(
        journal=ground.journal,
        metrics=metrics,
        display=display,
        beside=personal.activity if personal is not None else lambda activity: None,
    )
    return Watched(metrics=metrics, display=display, log=log, audit=audit, observer=AuditedObserver(observer, audit))


async def _serve(ground: Ground, watched: Watched, trainer: TrainerPort, personal: PersonalKeeper | None) -> None:
    display, credentials, journal = watched.display, ground.credentials, ground.journal

    def on_trouble(error: Exception) -> None:
        display.note("audit-log", detail=str(error) or repr(error))

    def clock_was_set(by_s: float) -> None:
        display.note("clock-was-set", by_s=round(by_s))

    async with kept_log(watched.log, watched.audit, on_trouble), AsyncExitStack() as open_here:
        client = _client(ground, watched)
        open_here.push_async_callback(client.close)
        await open_here.enter_async_context(beating(ground.folder.lock))
        await open_here.enter_async_context(kept_ballast(ground.folder.root))
        await open_here.enter_async_context(watched_clock(clock_was_set))
        keeper = _certificate_keeper(ground, watched, client)
        groups = _group_keeper(ground, watched, client)
        client.on_trust, client.on_groups = keeper.heard, groups.heard
        client.on_speaker = lambda coordinator: journal.set_fact(
            "coordinator_speaks", f"{coordinator.wire} {coordinator.release}".rstrip()
        )
        service = _service(ground, watched, client, groups, trainer)
        watched.metrics.depths(lambda: service.waiting)
        display.note("started", silo=credentials.silo, coordinator=credentials.address, paused=journal.paused())

        def reread() -> None:
            service.reread_journal()
            groups.wake()

        with _signals({signal.SIGTERM: service.stop, signal.SIGINT: service.stop, signal.SIGHUP: reread}):
            beside = [keeper.run(), groups.run(), *([] if personal is None else [personal.run()])]
            await _all(service.run(), *beside)
        display.note("stopped", silo=credentials.silo)


def _client(ground: Ground, watched: Watched) -> GrpcCoordinator:
    metrics = watched.metrics
    return GrpcCoordinator(
        channel=mutual_channel(ground.credentials),
        credentials=ground.credentials,
        models=ModelCache(ground.folder.models, kept=ground.settings.storage.models_kept),
        agent_version=software_version(),
        unreachable=watched.observer.unreachable,
        instance=next_instance(ground.journal, ground.folder.root),
        log_head=watched.log.head,
        traffic=Traffic(sent=metrics.sent.inc, received=metrics.received.inc, attending=metrics.attending),
    )


def _certificate_keeper(ground: Ground, watched: Watched, client: GrpcCoordinator) -> CertificateKeeper:
    def renewed(certificate: x509.Certificate) -> None:
        expires = certificate.not_valid_after_utc.isoformat()
        watched.log.append(
            Event.CERTIFICATE_RENEWED,
            who=watched.log.writer,
            serial=f"{certificate.serial_number:x}",
            expires=expires,
        )

    return CertificateKeeper(
        SiloCertificate(ground.folder, ground.credentials, client, on_renewed=renewed),
        backoff=Backoff(most_s=MOST_RENEWAL_WAIT_S),
        told=watched.display.note,
        expires=watched.metrics.certificate_expiry.set,
    )


def _group_keeper(ground: Ground, watched: Watched, client: GrpcCoordinator) -> GroupKeeper:
    first_use = ground.settings.policy.trust_on_first_use
    return GroupKeeper(
        ReleaseGroups(
            group_chain(ground.folder, ground.credentials, ground.policy),
            trust_store(ground.folder, ground.credentials, first_use=first_use),
            ground.credentials,
            client=client,
            log=watched.log,
            first_use=first_use,
        ),
        backoff=Backoff(),
        told=watched.display.note,
        refused=watched.observer.refused,
        waits=watched.metrics.groups_wait.set,
    )


def _service(
    ground: Ground, watched: Watched, client: GrpcCoordinator, groups: GroupKeeper, trainer: TrainerPort
) -> AgentService:
    folder, credentials, policy = ground.folder, ground.credentials, ground.policy

    def goes_back(plan: Digest, model: Digest, made: int, newest: int) -> None:
        watched.audit.goes_back(plan, model, made, newest)
        watched.display.note("model-went-back", plan=plan, model=model, round=made, accepted_round=newest)

    coordinator = AuditedCoordinator(client, watched.audit)
    return AgentService(
        federation=credentials.federation,
        coordinator=coordinator,
        journal=ground.journal,
        plans=PlanStore(folder.plans),
        gate=AuditedGate(policy, watched.audit, ground.settings.policy),
        trainer=trainer,
        masking=Masking(
            journal=masking_journal(folder, credentials),
            coordinator=coordinator,
            party=party_of(folder, credentials, policy, watched.log),
            newer_groups=groups.sync,
            unmasks=watched.audit.unmasks,
        ),
        checks=model_checks(
            folder,
            credentials,
            policy,
            coordinator=client,
            proves=watched.audit.proves,
            goes_back=goes_back,
            checked=watched.metrics.checked_chunks.inc,
        ),
        privacy=guard_of(folder, credentials, policy, ground.journal, sharing=ground.sharing),
        display=watched.display,
        observer=watched.observer,
    )


def _is_watched(console: Console) -> bool:
    """By a person: FORCE_COLOR alone, which rich takes for a terminal, makes no log a picture."""
    return sys.stderr.isatty() and not console.is_dumb_terminal


async def _all(main: Coroutine[None, None, None], *beside: Coroutine[None, None, None]) -> None:
    """`main` to its end; the others go on for as long, and what one of them raises ends all."""
    tasks = [asyncio.create_task(each) for each in (main, *beside)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


@contextmanager
def _signals(handlers: dict[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
