"""The agent itself: `silo-agent enroll`, `start`, `pause`, `resume`, `status`."""

import json
import signal
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
)
from silo_agent.commands.identity_commands import finish_rotation
from silo_agent.commands.privacy_commands import spent_of_allowed
from silo_agent.edges.disk.silo_folder import silo_folder

if TYPE_CHECKING:
    from silo_agent.edges.keys.key_store import SiloCredentials
    from silo_agent.rounds.events import SavedUpdate
    from silo_wire.plans.plan import PlanBundle


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
            help="The line that `coordinator invite` printed, also in pieces as a mail program wraps it; `-` reads "
            "it from stdin.",
        ),
    ],
    directory: Dir = None,
    identity_key: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="pkcs11: URI of an Ed25519 key in a token, in place of a new one.", show_default=False
        ),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="pkcs11: URI of an ECDSA key in a token, in place of new ones.", show_default=False
        ),
    ] = None,
) -> None:
    """Make this silo's keys, prove the token, and store the certificate. Private keys never leave the folder."""
    import asyncio

    from lorica_security.audit.entry import Event
    from lorica_security.identity.enrolment_token import decode
    from lorica_security.identity.identity_key import public_key_bytes
    from silo_agent.edges.accounts.audit_log import audited
    from silo_agent.edges.console.pasted import pasted_token
    from silo_agent.edges.keys.key_store import refuse_second_enrolment, store_credentials
    from silo_agent.edges.wire.enrolment_client import SiloKeys, enrol

    folder = silo_folder(directory)
    parsed = pasted_token(sys.stdin) if token == ["-"] else decode("\n".join(token))
    refuse_second_enrolment(folder)
    given: dict[str, Any] = {}
    if identity_key is not None or tls_key is not None:  # before the enrolment token is spent
        from lorica_security.pkcs11_keys.reference import identity_in_token, tls_key_in_token

        given |= {} if identity_key is None else {"identity": identity_in_token(identity_key, folder.root)}
        given |= {} if tls_key is None else {"tls": tls_key_in_token(tls_key, folder.root)}
    folder.make()
    keys = SiloKeys(**given)
    credentials = asyncio.run(enrol(parsed, now=datetime.now(UTC), agent_version=software_version(), keys=keys))
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
    import asyncio

    import structlog

    from lorica_security.host import ballast
    from lorica_security.host.files import sweep
    from lorica_security.host.private_memory import keep_memory_private
    from lorica_security.host.process_lock import ProcessLock
    from silo_agent.composition import run_agent
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
                f"the last start had --config {last.config}, and this one has none: it would run by other rules; "
                "give it again, or the file whose rules are to hold from now on"
            )
        settings = replace(choice, rules=last.rules).settings(folder)
        read = str(choice.file(folder) or "")
        journal.set_fact("started_with", json.dumps(asdict(replace(choice, rules=read))))
        asyncio.run(
            run_agent(
                folder,
                credentials,
                settings,
                policy=policy_of(folder, credentials, settings),
                sources=silo_sources(folder, settings),
                journal=journal,
                where=where,
            )
        )


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
    from silo_agent.edges.disk.answers_right import answers_right
    from silo_agent.edges.disk.plan_store import PlanStore
    from silo_agent.edges.personal.own_scores import own_scores
    from silo_agent.edges.personal.shown import own_models_facts, own_models_lines
    from silo_wire.canonical import Digest
    from silo_wire.wire_version import OURS

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    policy = policy_of(folder, credentials, chosen(folder, None, None, None).settings(folder))
    with open_journal(folder, credentials) as journal:
        agent = holder(folder.lock)
        model = journal.last_model()
        plan = journal.fact("plan")
        bundle = None if plan is None else PlanStore(folder.plans).load(Digest(plan))
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
            "plan": plan,
            "model": model.model if model else None,
            "last_loss_reduction": last_loss_reduction(bundle, journal.saved_update()),
            "privacy_budget": spent_of_allowed(
                guard_of(folder, credentials, policy, journal, sharing=sharing_of(folder, policy.rules.shared_budget))
            ),
        }
        history, refusals = journal.history(10), journal.refusals(10)
    own = own_scores(folder.personal).read()
    right = answers_right(folder.answers_right).read().of_plan(plan)
    if as_json:
        lists = {
            "history": [asdict(outcome) for outcome in history],
            "refusals": [asdict(refusal) for refusal in refusals],
        }
        print(
            json.dumps(
                {**facts, "answers_right": right.shares or None, "own_models": own_models_facts(own), **lists}, indent=1
            )
        )
        return
    for name, value in facts.items():
        shown = "none" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        print(f"{name.replace('_', ' '):<24} {shown}")
    if right.right:
        print(f"global model, {right.line}")
    for line in own_models_lines(own):
        print(line)
    for outcome in history:
        at = datetime.fromtimestamp(outcome.unix_s, UTC).isoformat(timespec="seconds")
        detail = f" ({outcome.detail})" if outcome.detail else ""
        print(f"{at} round {outcome.round} attempt {outcome.attempt} {outcome.work}: {outcome.outcome}{detail}")
    for refusal in refusals:
        at = datetime.fromtimestamp(refusal.unix_s, UTC).isoformat(timespec="seconds")
        print(f"{at} refused by {refusal.rule}: {refusal.detail}")


def last_loss_reduction(bundle: "PlanBundle | None", update: "SavedUpdate | None") -> str | None:
    """Of the newest update, where the plan weighs by it; its silo alone knows it under masks."""
    if bundle is None or update is None or update.key.plan != bundle.plan.digest or not bundle.plan.weighted:
        return None
    if not update.summary.optimizer_steps:  # of a closing round, in which nobody trains
        return None
    why = bundle.plan.no_weight(update.summary)
    return f"{update.summary.loss_reduction:.4g} in round {update.key.round}{f': {why}' if why else ''}"


def _validity_problem(credentials: "SiloCredentials") -> str | None:
    from lorica_security.pki.validity import Window

    return Window.of(credentials.certificate).problem_at(datetime.now(UTC))
