"""The agent itself: `silo-agent enroll`, `start`, `pause`, `resume`, `status`."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.console.terminal import terminal
from lorica_security.errors import (
    ConfigurationError,
    OutsideValidity,
)
from lorica_security.host.software_version import software_version
from silo_agent.commands.command_line import (
    Choice,
    Config,
    Data,
    Database,
    Dir,
    Json,
    chosen,
    credentials_of,
    open_journal,
    policy_of,
    silo_sources,
    started_with,
    tell_agent,
    workshop_of,
)
from silo_agent.commands.identity_commands import finish_rotation
from silo_agent.commands.privacy_commands import spent_of_allowed
from silo_agent.edges.disk.silo_folder import SiloFolder, silo_folder

if TYPE_CHECKING:
    from cryptography import x509
    from rich.console import Console

    from silo_agent.edges.console.logs import Whereabouts
    from silo_agent.edges.disk.round_journal import RoundJournal
    from silo_agent.edges.keys.key_store import SiloCredentials
    from silo_agent.settings import Settings
    from silo_wire.canonical import Digest


MOST_RENEWAL_WAIT_S = 300.0
"""Between two tries to renew the certificate."""


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Level = Annotated[LogLevel, typer.Option("--log-level", help="Least level of the log lines on stderr.")]


def enroll(
    token: Annotated[
        list[str],
        typer.Argument(
            metavar="TOKEN",
            help="The line that `coordinator invite` printed, also in pieces as a mail program wraps it; `-` reads it from stdin.",
        ),
    ],
    directory: Dir = None,
) -> None:
    """Make this silo's keys, prove the token, and store the certificate. Private keys never leave the folder."""
    from lorica_security.audit.entry import Event
    from lorica_security.identity.enrolment_token import decode
    from lorica_security.identity.identity_key import public_key_bytes
    from silo_agent.edges.accounts.audit_log import audited
    from silo_agent.edges.console.pasted import pasted_token
    from silo_agent.edges.keys.key_store import refuse_second_enrolment, store_credentials
    from silo_agent.edges.wire.enrolment_client import enrol

    folder = silo_folder(directory)
    parsed = pasted_token(sys.stdin) if token == ["-"] else decode("\n".join(token))
    refuse_second_enrolment(folder)
    folder.make()
    credentials = asyncio.run(enrol(parsed, now=datetime.now(UTC), agent_version=software_version()))
    store_credentials(folder, credentials)
    with audited(folder, credentials) as log:
        log.append(
            Event.ENROLLED,
            who=credentials.identity.uri,
            coordinator=credentials.address,
            coordinator_key=public_key_bytes(credentials.coordinator_key).hex(),
            identity_key=public_key_bytes(credentials.identity_key.public_key()).hex(),
            certificate=f"{credentials.certificate.serial_number:x}",
        )
    print(f"enrolled {credentials.identity.uri} in {folder.root}")
    print(f"certificate valid until {credentials.certificate.not_valid_after_utc.isoformat()}")


def start(
    data: Data = None,
    database: Database = None,
    config: Config = None,
    directory: Dir = None,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Run the agent until SIGTERM or Ctrl-C. SIGHUP makes it read `pause` and `resume` again."""
    import structlog

    from lorica_security.host import ballast
    from lorica_security.host.files import sweep
    from lorica_security.host.private_memory import keep_memory_private
    from lorica_security.host.process_lock import ProcessLock
    from silo_agent.edges.console.logs import configure_logs
    from silo_wire.transport import keep_chunks_in_memory

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it is handled: what it would have read is read later anyway
    keep_memory_private()
    keep_chunks_in_memory()
    folder = silo_folder(directory)
    where = configure_logs(log_level.value)
    credentials = credentials_of(folder)
    where.silo = credentials.silo
    folder.make()
    problem = _validity_problem(credentials)
    if problem:
        raise OutsideValidity(
            f"certificate of {credentials.identity.uri} {problem}; if it has expired the operator runs "
            f"`coordinator invite {credentials.silo}`, and you `silo-agent enroll` into a new folder"
        )
    choice = Choice(
        data=str(data.absolute()) if data else "",
        database=database or "",
        config=str(config.absolute()) if config else "",
    )
    ballast.keep(folder.root)
    with ProcessLock(folder.lock, "silo agent"), open_journal(folder, credentials) as journal:
        sweep(folder.root)
        finish_rotation(folder, structlog.get_logger().warning)
        credentials = credentials_of(folder)  # once more: no other process changes them from here on
        last = started_with(journal)
        if last.config and not choice.config:
            raise ConfigurationError(
                f"the last start had --config {last.config}, and this one has none: it would run by other rules; give it again, or the "
                "file whose rules are to hold from now on"
            )
        settings = replace(choice, rules=last.rules).settings(folder)
        read = str(choice.file(folder) or "")
        journal.set_fact("started_with", json.dumps(asdict(replace(choice, rules=read))))
        asyncio.run(_run_agent(folder, credentials, settings, journal, where))


async def _run_agent(
    folder: SiloFolder,
    credentials: "SiloCredentials",
    settings: "Settings",
    journal: "RoundJournal",
    where: "Whereabouts",
) -> None:
    from lorica_security.audit.entry import Event
    from lorica_security.daemon.clock_watch import watched_clock
    from lorica_security.daemon.heartbeat import beating
    from lorica_security.daemon.kept_ballast import kept_ballast
    from lorica_security.daemon.sealed_log import kept_log
    from silo_agent.edges.accounts.audit_log import audit_log
    from silo_agent.edges.accounts.privacy_ledger import guard_of
    from silo_agent.edges.accounts.shared_budget import sharing_of
    from silo_agent.edges.console.display import LogDisplay, TerminalDisplay
    from silo_agent.edges.console.metrics import metrics_served
    from silo_agent.edges.console.observer import SiloObserver
    from silo_agent.edges.disk.instance import next_instance
    from silo_agent.edges.disk.model_cache import ModelCache
    from silo_agent.edges.disk.plan_store import PlanStore
    from silo_agent.edges.groups.release_groups import ReleaseGroups, group_chain
    from silo_agent.edges.keys.own_entropy import own_entropy
    from silo_agent.edges.masks.masking_party import party_of
    from silo_agent.edges.masks.model_checking import model_checks
    from silo_agent.edges.memory.masking_journal import masking_journal
    from silo_agent.edges.memory.trust_store import trust_store
    from silo_agent.edges.wire.backoff import Backoff
    from silo_agent.edges.wire.calls.repeated_calls import Traffic
    from silo_agent.edges.wire.certificate import SiloCertificate
    from silo_agent.edges.wire.channel import mutual_channel
    from silo_agent.edges.wire.grpc_client import GrpcCoordinator
    from silo_agent.edges.workshop.late_workshop import LateWorkshop
    from silo_agent.service.agent import AgentService
    from silo_agent.service.audited import AuditedCoordinator, AuditedGate, AuditedObserver, SiloAudit
    from silo_agent.service.certificate_keeper import CertificateKeeper
    from silo_agent.service.group_keeper import GroupKeeper
    from silo_agent.service.masking import Masking

    sources = silo_sources(folder, settings)
    sources.data()  # bad data ends the command here, before anything heavy is loaded
    console = terminal(stderr=True)
    async with metrics_served(settings.metrics.listen, folder.root) as metrics:
        with TerminalDisplay(console) if _is_watched(console) else LogDisplay(where) as display:
            policy = policy_of(folder, credentials, settings)
            sharing = sharing_of(folder, settings.policy.shared_budget)
            entropy = own_entropy(folder.own_entropy)
            trainer = LateWorkshop(lambda: workshop_of(settings, policy, sources, entropy, sharing))
            log = audit_log(folder, credentials)
            audit = SiloAudit(
                log,
                federation=credentials.federation,
                silo=credentials.silo,
                ledger_head=journal.ledger_head,
                clock=time.time,
            )
            observer = AuditedObserver(SiloObserver(journal=journal, metrics=metrics, display=display), audit)

            def on_trouble(error: Exception) -> None:
                display.note("audit-log", detail=str(error) or repr(error))

            async with kept_log(log, audit, on_trouble), AsyncExitStack() as open_here:
                client = GrpcCoordinator(
                    channel=mutual_channel(credentials),
                    credentials=credentials,
                    models=ModelCache(folder.models, kept=settings.storage.models_kept),
                    agent_version=software_version(),
                    unreachable=observer.unreachable,
                    instance=next_instance(journal, folder.root),
                    log_head=log.head,
                    traffic=Traffic(sent=metrics.sent.inc, received=metrics.received.inc, attending=metrics.attending),
                )
                open_here.push_async_callback(client.close)
                await open_here.enter_async_context(beating(folder.lock))
                await open_here.enter_async_context(kept_ballast(folder.root))

                def clock_was_set(by_s: float) -> None:
                    display.note("clock-was-set", by_s=round(by_s))

                await open_here.enter_async_context(watched_clock(clock_was_set))

                def renewed(certificate: "x509.Certificate") -> None:
                    expires = certificate.not_valid_after_utc.isoformat()
                    log.append(
                        Event.CERTIFICATE_RENEWED,
                        who=log.writer,
                        serial=f"{certificate.serial_number:x}",
                        expires=expires,
                    )

                keeper = CertificateKeeper(
                    SiloCertificate(folder, credentials, client, on_renewed=renewed),
                    backoff=Backoff(most_s=MOST_RENEWAL_WAIT_S),
                    told=display.note,
                    expires=metrics.certificate_expiry.set,
                )
                client.on_trust = keeper.heard

                def goes_back(plan: "Digest", model: "Digest", made: int, newest: int) -> None:
                    audit.goes_back(plan, model, made, newest)
                    display.note("model-went-back", plan=plan, model=model, round=made, accepted_round=newest)

                first_use = settings.policy.trust_on_first_use
                groups = GroupKeeper(
                    ReleaseGroups(
                        group_chain(folder, credentials, policy),
                        trust_store(folder, credentials, first_use=first_use),
                        credentials,
                        client=client,
                        log=log,
                        first_use=first_use,
                    ),
                    backoff=Backoff(),
                    told=display.note,
                    refused=observer.refused,
                    waits=metrics.groups_wait.set,
                )
                client.on_groups = groups.heard
                client.on_speaker = lambda coordinator: journal.set_fact(
                    "coordinator_speaks", f"{coordinator.wire} {coordinator.release}".rstrip()
                )
                coordinator = AuditedCoordinator(client, audit)
                service = AgentService(
                    federation=credentials.federation,
                    coordinator=coordinator,
                    journal=journal,
                    plans=PlanStore(folder.plans),
                    gate=AuditedGate(policy, audit, settings.policy),
                    trainer=trainer,
                    masking=Masking(
                        journal=masking_journal(folder, credentials),
                        coordinator=coordinator,
                        party=party_of(folder, credentials, policy, log),
                        newer_groups=groups.sync,
                        unmasks=audit.unmasks,
                    ),
                    checks=model_checks(
                        folder,
                        credentials,
                        policy,
                        coordinator=client,
                        proves=audit.proves,
                        goes_back=goes_back,
                        checked=metrics.checked_chunks.inc,
                    ),
                    privacy=guard_of(folder, credentials, policy, journal, sharing=sharing),
                    display=display,
                    observer=observer,
                )
                metrics.depths(lambda: service.waiting)
                display.note("started", silo=credentials.silo, coordinator=credentials.address, paused=journal.paused())

                def reread() -> None:
                    service.reread_journal()
                    groups.wake()

                with _signals({signal.SIGTERM: service.stop, signal.SIGINT: service.stop, signal.SIGHUP: reread}):
                    await _all(service.run(), keeper.run(), groups.run())
                display.note("stopped", silo=credentials.silo)


def _is_watched(console: "Console") -> bool:
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


def pause(directory: Dir = None) -> None:
    """Take no new round; the one that is running is finished. Lasts until `resume`, also over restarts."""
    _set_paused(directory, True)


def resume(directory: Dir = None) -> None:
    """Take rounds again."""
    _set_paused(directory, False)


def _set_paused(directory: Path | None, paused: bool) -> None:
    from lorica_security.audit.entry import Event
    from silo_agent.edges.accounts.audit_log import audited

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    with open_journal(folder, credentials) as journal, audited(folder, credentials) as log:
        log.append(Event.PAUSED if paused else Event.RESUMED)
        journal.set_paused(paused)
    print(f"{'paused' if paused else 'resumed'}; {tell_agent(folder)}")


def status(directory: Dir = None, as_json: Json = False) -> None:
    """What this silo is, what it does, and how its last rounds ended."""
    from lorica_security.host.process_lock import holder
    from silo_agent.edges.accounts.privacy_ledger import guard_of
    from silo_agent.edges.accounts.shared_budget import sharing_of
    from silo_wire.wire_version import OURS

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    policy = policy_of(folder, credentials, chosen(folder, None, None, None).settings(folder))
    with open_journal(folder, credentials) as journal:
        agent = holder(folder.lock)
        model = journal.last_model()
        facts = {
            "federation": credentials.federation,
            "silo": credentials.silo,
            "folder": str(folder.root),
            "coordinator": credentials.address,
            "certificate_valid_until": credentials.certificate.not_valid_after_utc.isoformat(),
            "running": agent is not None,
            "process": agent,
            "paused": journal.paused(),
            "version": software_version(),
            "wire": str(OURS),
            "coordinator_wire_and_version": journal.fact("coordinator_speaks"),
            "activity": (journal.fact("activity") or "starting") if agent else "not running",
            "plan": journal.fact("plan"),
            "model": model.model if model else None,
            "privacy_budget": spent_of_allowed(
                guard_of(folder, credentials, policy, journal, sharing=sharing_of(folder, policy.rules.shared_budget))
            ),
        }
        history, refusals = journal.history(10), journal.refusals(10)
    if as_json:
        lists = {
            "history": [asdict(outcome) for outcome in history],
            "refusals": [asdict(refusal) for refusal in refusals],
        }
        print(json.dumps({**facts, **lists}, indent=1))
        return
    for name, value in facts.items():
        shown = "none" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        print(f"{name.replace('_', ' '):<24} {shown}")
    for outcome in history:
        at = datetime.fromtimestamp(outcome.unix_s, UTC).isoformat(timespec="seconds")
        detail = f" ({outcome.detail})" if outcome.detail else ""
        print(f"{at} round {outcome.round} attempt {outcome.attempt} {outcome.work}: {outcome.outcome}{detail}")
    for refusal in refusals:
        at = datetime.fromtimestamp(refusal.unix_s, UTC).isoformat(timespec="seconds")
        print(f"{at} refused by {refusal.rule}: {refusal.detail}")


def _validity_problem(credentials: "SiloCredentials") -> str | None:
    from lorica_security.pki.validity import Window

    return Window.of(credentials.certificate).problem_at(datetime.now(UTC))
