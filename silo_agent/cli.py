"""The `silo-agent` command: parses, constructs, prints. Heavy imports happen in the command that needs them.

Every LoricaError ends as one line on stderr and the exit code of security.errors.EXIT_CODES.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from security.errors import (
    EXIT_CODES,
    AuthenticationError,
    ConfigurationError,
    DataError,
    LoricaError,
    PolicyRefusal,
    StateError,
    UnsafeSql,
)
from silo_agent.edges.silo_folder import ENVIRONMENT_VARIABLE, SiloFolder, silo_folder

if TYPE_CHECKING:
    from silo_agent.edges.key_store import SiloCredentials
    from silo_agent.edges.round_journal import RoundJournal
    from silo_agent.edges.silo_sources import SiloSources
    from silo_agent.edges.workshop import Workshop
    from silo_agent.settings import Settings

app = typer.Typer(
    help="Run one silo of a federation: its data and its private keys stay here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


Dir = Annotated[
    Path | None,
    typer.Option("--dir", help=f"The silo's folder. Default: ${ENVIRONMENT_VARIABLE}, else the user's data folder."),
]
Data = Annotated[Path | None, typer.Option("--data", help="Folder with train.jsonl, dev.jsonl and schema.json.")]
Database = Annotated[
    str | None, typer.Option("--database", help="sqlite:///PATH or postgresql://..., opened read-only.")
]
Config = Annotated[Path | None, typer.Option("--config", help="silo.toml; default: the one in the silo's folder.")]
Level = Annotated[LogLevel, typer.Option("--log-level", help="Least level of the log lines on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    try:
        app(prog_name="silo-agent")
    except LoricaError as error:
        print(f"silo-agent: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(next(EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES))


def agent_version() -> str:
    try:
        return version("lorica")
    except PackageNotFoundError:
        return "0+source"


# ---- enrolment ------------------------------------------------------------------------------------------------------


@app.command()
def enroll(
    line: Annotated[
        str,
        typer.Argument(metavar="TOKEN", help="The line that `coordinator invite` printed; `-` reads it from stdin."),
    ],
    directory: Dir = None,
) -> None:
    """Make this silo's keys, prove the token, and store the certificate. Private keys never leave the folder."""
    from security.pki.enrolment_token import decode
    from silo_agent.edges.enrolment_client import enrol
    from silo_agent.edges.key_store import refuse_second_enrolment, store_credentials

    folder = silo_folder(directory)
    parsed = decode(sys.stdin.readline() if line == "-" else line)
    refuse_second_enrolment(folder)
    folder.make()
    credentials = asyncio.run(enrol(parsed, now=datetime.now(UTC), agent_version=agent_version()))
    store_credentials(folder, credentials)
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
    from security.process_lock import ProcessLock
    from silo_agent.edges.logs import configure_logs
    from silo_wire.transport import keep_chunks_in_memory

    keep_chunks_in_memory()
    folder = silo_folder(directory)
    configure_logs(log_level.value)
    credentials = _credentials(folder)
    folder.make()
    problem = _validity_problem(credentials)
    if problem:
        raise AuthenticationError(f"certificate of {credentials.identity.uri} {problem}")
    choice = Choice(
        data=str(data.absolute()) if data else "",
        database=database or "",
        config=str(config.absolute()) if config else "",
    )
    with ProcessLock(folder.lock, "silo agent"), _journal(folder, credentials) as journal:
        settings = choice.settings(folder)
        journal.set_fact("started_with", json.dumps(asdict(choice)))
        asyncio.run(_run_agent(folder, credentials, settings, journal))


async def _run_agent(
    folder: SiloFolder, credentials: "SiloCredentials", settings: "Settings", journal: "RoundJournal"
) -> None:
    from rich.console import Console

    from silo_agent.edges.channel import mutual_channel
    from silo_agent.edges.display import LogDisplay, TerminalDisplay
    from silo_agent.edges.grpc_client import GrpcCoordinator
    from silo_agent.edges.instance import next_instance
    from silo_agent.edges.model_cache import ModelCache
    from silo_agent.edges.plan_store import PlanStore
    from silo_agent.policy import SiloPolicy
    from silo_agent.service.agent import AgentService

    sources = _sources(folder, settings)
    sources.data()  # bad data ends the command here, before anything heavy is loaded
    trainer = _workshop(settings, credentials, sources)
    console = Console(stderr=True)
    with LogDisplay() if not console.is_terminal else TerminalDisplay(console) as display:

        def unreachable(problem: LoricaError, seconds: float) -> None:
            display.note("unreachable", detail=str(problem), next_try_s=round(seconds, 1))

        async with mutual_channel(credentials) as channel:
            service = AgentService(
                federation=credentials.federation,
                coordinator=GrpcCoordinator(
                    channel=channel,
                    credentials=credentials,
                    models=ModelCache(folder.models, kept=settings.storage.models_kept),
                    agent_version=agent_version(),
                    unreachable=unreachable,
                    instance=next_instance(journal, folder.root),
                ),
                journal=journal,
                plans=PlanStore(folder.plans),
                gate=SiloPolicy(rules=settings.policy, silo=credentials.silo),
                trainer=trainer,
                display=display,
            )
            display.note("started", silo=credentials.silo, coordinator=credentials.address, paused=journal.paused())
            with _signals(
                {signal.SIGTERM: service.stop, signal.SIGINT: service.stop, signal.SIGHUP: service.reread_journal}
            ):
                await service.run()
            display.note("stopped", silo=credentials.silo)


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


@app.command()
def pause(directory: Dir = None) -> None:
    """Take no new round; the one that is running is finished. Lasts until `resume`, also over restarts."""
    _set_paused(directory, True)


@app.command()
def resume(directory: Dir = None) -> None:
    """Take rounds again."""
    _set_paused(directory, False)


def _set_paused(directory: Path | None, paused: bool) -> None:
    from security.process_lock import holder

    folder = silo_folder(directory)
    with _journal(folder, _credentials(folder)) as journal:
        journal.set_paused(paused)
    agent = holder(folder.lock)
    if agent is not None:
        with suppress(ProcessLookupError):  # it has just ended, and reads the journal when it starts again
            os.kill(agent, signal.SIGHUP)
    word = "paused" if paused else "resumed"
    print(f"{word}; the running agent (process {agent}) was told" if agent else f"{word}; no agent is running")


# ---- looking --------------------------------------------------------------------------------------------------------


@app.command()
def status(directory: Dir = None, as_json: Json = False) -> None:
    """What this silo is, what it does, and how its last rounds ended."""
    from security.process_lock import holder

    folder = silo_folder(directory)
    credentials = _credentials(folder)
    with _journal(folder, credentials) as journal:
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
            "activity": (journal.fact("activity") or "starting") if agent else "not running",
            "plan": journal.fact("plan"),
            "model": model.model if model else None,
        }
        history = journal.history(10)
    if as_json:
        print(json.dumps({**facts, "history": [asdict(outcome) for outcome in history]}, indent=1))
        return
    for name, value in facts.items():
        shown = "none" if value is None else {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
        print(f"{name.replace('_', ' '):<24} {shown}")
    for outcome in history:
        at = datetime.fromtimestamp(outcome.unix_s, UTC).isoformat(timespec="seconds")
        detail = f" ({outcome.detail})" if outcome.detail else ""
        print(f"{at} round {outcome.round} attempt {outcome.attempt} {outcome.work}: {outcome.outcome}{detail}")


@app.command()
def check(data: Data = None, database: Database = None, config: Config = None, directory: Dir = None) -> None:
    """Look at everything that could keep this silo from taking part; exit with 3 if something does."""
    from rich.console import Console
    from rich.table import Table

    from silo_agent.edges.preflight import Ground, Outcome, preflight

    folder = silo_folder(directory)
    given = _choice(folder, data, database, config)
    settings = given.settings(folder)

    sources = _sources(folder, settings)
    ground = Ground(
        folder=folder,
        settings=settings,
        now=lambda: datetime.now(UTC),
        data=sources.summary,
        database=sources.check_database,
    )
    checks = asyncio.run(preflight(ground))
    table = Table("check", "outcome", title=f"silo-agent check of {folder.root}")
    table.add_column("what was found, and the remedy", overflow="fold")
    for item in checks:
        table.add_row(item.name, item.outcome.value, item.detail)
    Console().print(table, markup=False)
    failed = [item.name for item in checks if item.outcome is Outcome.FAILED]
    if failed:
        raise ConfigurationError(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


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
    from silo_agent.edges.model_cache import ModelCache
    from silo_agent.edges.plan_store import PlanStore
    from silo_agent.service.ports import RoundModel

    folder = silo_folder(directory)
    credentials = _credentials(folder)
    settings = _choice(folder, data, database, config).settings(folder)
    with _journal(folder, credentials) as journal:
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
        workshop = _workshop(settings, credentials, _sources(folder, settings))
        model = RoundModel(file=file, manifest=header.manifest)
        sql = workshop.answer(bundle=bundle, model=model, question=question)
    if not as_json:
        print(_one_line(sql))
    rows, problem = None, None
    try:
        rows = workshop.run(sql)
    except (PolicyRefusal, UnsafeSql, DataError) as error:
        problem = error
    if as_json:
        result = {"columns": rows.columns, "rows": rows.rows} if rows else {}
        not_run = str(problem) if problem else ""
        print(json.dumps({"question": question, "sql": sql, "not_run": not_run, **result}, ensure_ascii=False))
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
) -> None:
    """Print the schema.json of a live database."""
    from silo_agent.edges.database_schema import read_schema
    from silo_agent.sql_sandbox import parse_database

    print(json.dumps(read_schema(parse_database(url), db_id=db_id), indent=1, ensure_ascii=False))


def _print_rows(columns: tuple[str, ...], rows: tuple[tuple[object, ...], ...]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*(escape(_one_line(column)) for column in columns))
    for row in rows:
        table.add_row(*(escape(_one_line(value)) for value in row))
    Console().print(table)


def _one_line(value: object) -> str:
    """A value of the database on a terminal: no control characters."""
    text = "NULL" if value is None else str(value)
    return "".join(character if character.isprintable() else " " for character in text)


# ---- what commands share --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a command line chose; `start` records it, so that `ask` and `check` use the same."""

    data: str = ""
    database: str = ""
    config: str = ""

    def settings(self, folder: SiloFolder) -> "Settings":
        """silo.toml of --config or of the folder, if there is one, with what the command line gives over it."""
        from silo_agent.settings import Settings

        if self.config:
            settings = Settings.read(Path(self.config))
        elif folder.settings.exists():
            settings = Settings.read(folder.settings)
        else:
            settings = Settings()
        given = Settings.model_validate({"data": {"folder": self.data}, "database": {"url": self.database}})
        given = given.resolved(Path.cwd())
        changes: dict[str, object] = {}
        if self.data:
            changes["data"] = settings.data.model_copy(update={"folder": given.data.folder})
        if self.database:
            changes["database"] = given.database
        return settings.model_copy(update=changes)


def _choice(folder: SiloFolder, data: Path | None, database: str | None, config: Path | None) -> Choice:
    recorded = {}
    if folder.enrolment.exists() and folder.journal.exists():
        with _journal(folder, _credentials(folder)) as journal:
            recorded = json.loads(journal.fact("started_with") or "{}")
    return Choice(
        data=str(data.absolute()) if data else recorded.get("data", ""),
        database=database or recorded.get("database", ""),
        config=str(config.absolute()) if config else recorded.get("config", ""),
    )


def _credentials(folder: SiloFolder) -> "SiloCredentials":
    from silo_agent.edges.key_store import load_credentials

    return load_credentials(folder)


def _validity_problem(credentials: "SiloCredentials") -> str | None:
    from security.pki.validity import Window

    return Window.of(credentials.certificate).problem_at(datetime.now(UTC))


@contextmanager
def _journal(folder: SiloFolder, credentials: "SiloCredentials") -> "Iterator[RoundJournal]":
    from silo_agent.edges.round_journal import RoundJournal

    with closing(RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo)) as journal:
        yield journal


def _sources(folder: SiloFolder, settings: "Settings") -> "SiloSources":
    from silo_agent.edges.silo_sources import SiloSources

    return SiloSources(settings, scratch=folder.root / "database")


def _workshop(settings: "Settings", credentials: "SiloCredentials", sources: "SiloSources") -> "Workshop":
    from silo_agent.edges.workshop import Workshop
    from silo_agent.policy import SiloPolicy

    policy = SiloPolicy(rules=settings.policy, silo=credentials.silo)
    return Workshop(settings=settings, policy=policy, sources=sources)


if __name__ == "__main__":
    main()
