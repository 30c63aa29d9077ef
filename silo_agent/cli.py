"""The `silo-agent` command: parses, constructs, prints. Heavy imports happen in the command that needs them.

Every LoricaError ends as one line on stderr and the exit code of lorica_security.errors.EXIT_CODES.
"""

import asyncio
import json
import signal
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.console.terminal import Page, list_whole_summaries, terminal
from lorica_security.errors import (
    EXIT_CODES,
    ConfigurationError,
    DataError,
    LoricaError,
    OutsideValidity,
    PolicyRefusal,
    StateError,
    UnsafeSql,
)
from lorica_security.host.program import begin_program
from lorica_security.host.software_version import software_version
from silo_agent.commands.audit_commands import audit_app
from silo_agent.commands.command_line import (
    Choice,
    Config,
    Data,
    Database,
    Dir,
    Json,
    chosen,
    credentials_of,
    json_text,
    one_line,
    open_journal,
    policy_of,
    started_with,
    tell_agent,
)
from silo_agent.commands.groups_commands import groups_app
from silo_agent.commands.identity_commands import finish_rotation, identity_app
from silo_agent.commands.import_commands import import_data
from silo_agent.commands.key_commands import key_app
from silo_agent.commands.plan_commands import plan_app
from silo_agent.commands.privacy_commands import privacy_app, spent_of_allowed
from silo_agent.commands.trust_commands import trust_app
from silo_agent.edges.disk.silo_folder import SiloFolder, silo_folder

if TYPE_CHECKING:
    from silo_agent.edges.disk.model_cache import ModelCache
    from silo_agent.edges.keys.key_store import SiloCredentials
    from silo_agent.edges.workshop.silo_sources import SiloSources
    from silo_agent.service.ports import RoundModel
    from silo_agent.settings import Settings
    from silo_wire.plans.plan import PlanBundle


app = typer.Typer(
    help="Run one silo of a federation: its data and its private keys stay here.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts name [sections] of files
)
app.add_typer(identity_app, name="identity")
app.add_typer(audit_app, name="audit")
app.add_typer(key_app, name="keys")
app.add_typer(plan_app, name="plan")
app.add_typer(groups_app, name="groups")
app.add_typer(privacy_app, name="privacy")
app.add_typer(trust_app, name="trust")


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Level = Annotated[LogLevel, typer.Option("--log-level", help="Least level of the log lines on stderr.")]


def _say_version(asked: bool) -> None:
    if asked:
        print(f"silo-agent {software_version()}")
        raise typer.Exit


@app.callback()
def command(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run one silo of a federation: its data and its private keys stay here."""


def main() -> None:
    begin_program()
    try:
        app(prog_name="silo-agent")
    except LoricaError as error:
        print(f"silo-agent: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES))


# ---- enrolment ------------------------------------------------------------------------------------------------------


@app.command()
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


# ---- the agent ------------------------------------------------------------------------------------------------------


@app.command()
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
                f"the last start had --config {last.config}, and this one has none: it would run by other rules; give it again, or the "
                "file whose rules are to hold from now on"
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
                sources=_sources(folder, settings),
                journal=journal,
                where=where,
            )
        )


@app.command()
def pause(directory: Dir = None) -> None:
    """Take no new round; the one that is running is finished. Lasts until `resume`, also over restarts."""
    _set_paused(directory, True)


@app.command()
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


# ---- looking --------------------------------------------------------------------------------------------------------


@app.command()
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


@app.command()
def check(
    data: Data = None, database: Database = None, config: Config = None, directory: Dir = None, as_json: Json = False
) -> None:
    """Look at everything that could keep this silo from taking part; exit with 3 if something does."""
    from lorica_security.console.preflight import failures
    from lorica_security.console.preflight_page import check_json, check_page
    from silo_agent.edges.check.preflight import Ground, preflight

    folder = silo_folder(directory)
    ground = Ground(
        folder=folder,
        settings=lambda enrolled: _given(folder, data, database, config, recorded=enrolled).settings(folder),
        now=lambda: datetime.now(UTC),
        sources=lambda settings: _sources(folder, settings),
    )
    checks = asyncio.run(preflight(ground))
    if as_json:
        print(check_json(checks))
    else:
        check_page(checks, f"silo-agent check of {folder.root}").show(terminal())
    if problem := failures(checks):
        raise problem


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="In the language of the training questions.")],
    data: Data = None,
    database: Database = None,
    config: Config = None,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Answer with the newest global model: its SQL, and what that gives on this silo's database, in the sandbox."""
    from silo_agent.edges.disk.model_cache import ModelCache
    from silo_agent.edges.disk.plan_store import PlanStore
    from silo_agent.service.ports import RoundModel

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    settings = chosen(folder, data, database, config).settings(folder)
    with open_journal(folder, credentials) as journal:
        newest = journal.last_model()
    models = ModelCache(folder.models, kept=settings.storage.models_kept)
    header = models.header(newest.model) if newest else None
    bundle = PlanStore(folder.plans).load(newest.plan) if newest else None
    nothing = StateError("no global model is here yet: let `silo-agent start` take part in a round first")
    if newest is None or header is None or bundle is None or header.manifest.digest != newest.model:
        raise nothing
    with models.held(newest.model, folder.root) as file:
        if file is None:
            raise nothing
        # Here, not above: torch takes seconds to import.
        from silo_agent.edges.workshop.workshop import Workshop

        workshop = Workshop(
            settings=settings, policy=policy_of(folder, credentials, settings), sources=_sources(folder, settings)
        )
        model = RoundModel(file=file, manifest=header.manifest)
        sql = workshop.answer(bundle=bundle, base=_base(models, bundle), model=model, question=question)
    if not as_json:
        print(one_line(sql))
    rows, problem = None, None
    try:
        rows = workshop.run(sql)
    except (PolicyRefusal, UnsafeSql, DataError) as error:
        problem = error
    if as_json:
        result = {"columns": rows.columns, "rows": rows.rows} if rows else {}
        not_run = str(problem) if problem else ""
        print(json_text({"question": question, "sql": sql, "not_run": not_run, **result}))
    elif rows is not None:
        _print_rows(rows.columns, rows.rows)
    if isinstance(problem, PolicyRefusal):
        print(f"not run: {problem}", file=sys.stderr)  # the answer is the SQL; that it was not run is this silo's wish
    elif problem is not None:
        raise problem


@app.command()
def schema(
    url: Annotated[str, typer.Argument(help="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE.")],
    db_id: Annotated[
        str | None, typer.Option("--db-id", help="What the data's lines call it; else the database's own name.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="SCHEMA", help="Of PostgreSQL: take this schema and no other; repeatable."),
    ] = None,
) -> None:
    """Print the schema.json of a live database: every table that its role may read. What is left out is said on stderr."""
    from silo_agent.edges.workshop.database_schema import read_schema
    from silo_agent.sql_sandbox import parse_database

    live = read_schema(parse_database(url), db_id=db_id, only=only or ())
    for each in live.left_out:
        print(f"left out: {one_line(each)}", file=sys.stderr)
    print(json_text(live.entry, indent=1))


app.command("import")(import_data)


def _print_rows(columns: tuple[str, ...], rows: tuple[tuple[object, ...], ...]) -> None:
    Page(
        columns=[one_line(column) for column in columns], rows=[[one_line(value) for value in row] for row in rows]
    ).show(terminal())


def _given(
    folder: SiloFolder, data: Path | None, database: str | None, config: Path | None, *, recorded: bool
) -> Choice:
    """This command line, over what `start` recorded if that can be read."""
    if recorded:
        return chosen(folder, data, database, config)
    return Choice(
        data=str(data.absolute()) if data else "",
        database=database or "",
        config=str(config.absolute()) if config else "",
    )


# ---- what commands share --------------------------------------------------------------------------------------------


def _validity_problem(credentials: "SiloCredentials") -> str | None:
    from lorica_security.pki.validity import Window

    return Window.of(credentials.certificate).problem_at(datetime.now(UTC))


def _sources(folder: SiloFolder, settings: "Settings") -> "SiloSources":
    from silo_agent.edges.workshop.silo_sources import SiloSources

    return SiloSources(settings, scratch=folder.root / "database")


def _base(models: "ModelCache", bundle: "PlanBundle") -> "RoundModel | None":
    """The model that the plan's adapters are for, where it has adapters; raises StateError when it is not here."""
    from silo_agent.service.ports import RoundModel
    from silo_wire.canonical import Digest

    if bundle.plan.model.base is None:
        return None
    digest = Digest(bundle.plan.model.base)
    bases = models.base()
    header = bases.header(digest)
    if header is None or header.manifest.digest != digest:
        raise StateError(
            f"the model that the adapters of plan {bundle.plan.name} are for is not here: start silo-agent once more"
        )
    return RoundModel(file=bases.file(digest), manifest=header.manifest)


list_whole_summaries(app)

if __name__ == "__main__":
    main()
