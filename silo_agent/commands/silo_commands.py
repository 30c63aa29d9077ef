"""What a silo's people ask beside the agent: `silo-agent check`, `ask`, `personal train`, `schema`."""

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.console.terminal import Page, terminal
from lorica_security.errors import (
    ConfigurationError,
    DataError,
    PolicyRefusal,
    StateError,
    UnsafeSql,
)
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
    silo_sources,
)
from silo_agent.edges.disk.silo_folder import SiloFolder, silo_folder

if TYPE_CHECKING:
    from silo_agent.edges.disk.model_cache import ModelCache
    from silo_agent.edges.disk.round_journal import LastModel
    from silo_agent.edges.personal.own_models import Collected
    from silo_agent.service.ports import RoundModel
    from silo_agent.settings import Settings
    from silo_wire.plans.plan import PlanBundle


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
        sources=lambda settings: silo_sources(folder, settings),
    )
    checks = asyncio.run(preflight(ground))
    if as_json:
        print(check_json(checks))
    else:
        check_page(checks, f"silo-agent check of {folder.root}").show(terminal())
    if problem := failures(checks):
        raise problem


class AskedModel(Enum):
    BEST = "best"
    GLOBAL = "global"
    PERSONAL = "personal"
    LOCAL = "local"


def tasks(directory: Dir = None, config: Config = None, as_json: Json = False) -> None:
    """Tasks that this silo's people installed, with version and digest as a plan names them."""
    from silo_agent.training.tasks.installed import installed_tasks

    folder = silo_folder(directory)
    allowed = chosen(folder, None, None, config).settings(folder).policy.tasks
    found, wrong = [], []
    for one in installed_tasks():
        if isinstance(one, DataError):
            wrong.append(one)
        else:
            found.append((one.name, one.version, one.digest, one.name in allowed))
    if as_json:
        keys = ("task", "version", "digest", "allowed")
        print(json_text([dict(zip(keys, row, strict=True)) for row in found]))
    elif not found:
        print("none is installed but sql, wikisql and text-to-text, which Lorica brings")
    else:
        rows = [(name, version, digest, "yes" if allows else "no") for name, version, digest, allows in found]
        Page(columns=("task", "version", "digest", "in [policy] tasks"), rows=rows).show(terminal())
        if named := [name for name, *_, allows in found if not allows]:
            line = f"tasks = {json.dumps([*allowed, *named])}"
            print(f"to train for {', '.join(named)}, put this line under [policy] of {folder.settings}: {line}")
    for error in wrong[1:]:
        print(one_line(str(error)), file=sys.stderr)
    if wrong:
        raise wrong[0]


def ask(
    question: Annotated[str, typer.Argument(help="In the language of the training questions.")],
    asked: Annotated[
        AskedModel,
        typer.Option("--model", help="best: of the global model and this silo's own, by its held-out questions."),
    ] = AskedModel.BEST,
    data: Data = None,
    database: Database = None,
    config: Config = None,
    directory: Dir = None,
    as_json: Json = False,
) -> None:
    """Answer with the best of the newest global model and this silo's own: its SQL, and what that gives on this silo's
    database, in the sandbox; or its text, where the plan's task is another."""
    from silo_agent.edges.personal.answering import answering
    from silo_agent.edges.personal.own_models import OwnModels

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    settings = chosen(folder, data, database, config).settings(folder)
    with open_journal(folder, credentials) as journal:
        newest = journal.last_model()
    with _collected(folder, settings, newest) as collected:
        trains = settings.personal.method != "none"
        answers = answering(OwnModels(folder.personal), collected, asked.value, trains=trains)
        # Here, not above: torch takes seconds to import.
        from silo_agent.edges.workshop.workshop import Workshop

        sources, policy = silo_sources(folder, settings), policy_of(folder, credentials, settings)
        workshop = Workshop(settings=settings, policy=policy, sources=sources)
        answer = workshop.answer(bundle=collected.bundle, base=collected.base, model=answers.model, question=question)
        is_sql = collected.bundle.plan.task.is_sql
    if not as_json:
        print(one_line(answer))
    rows, problem = None, None
    try:
        rows = workshop.run(answer) if is_sql else None
    except (PolicyRefusal, UnsafeSql, DataError) as error:
        problem = error
    if as_json:
        result = {"columns": rows.columns, "rows": rows.rows} if rows else {}
        not_run = str(problem) if problem else ""
        said = {"sql": answer, "not_run": not_run, **result} if is_sql else {"answer": answer}
        print(json_text({"question": question, "model": answers.which, **said}))
    elif rows is not None:
        _print_rows(rows.columns, rows.rows)
    for told in answers.told:
        print(told, file=sys.stderr)
    if isinstance(problem, PolicyRefusal):
        print(f"not run: {problem}", file=sys.stderr)  # the answer is the SQL; that it was not run is this silo's wish
    elif problem is not None:
        raise problem


personal_app = typer.Typer(
    help="Models of this silo's own, beside the global one; nothing of them leaves.", no_args_is_help=True
)


@personal_app.callback()
def personal() -> None:
    """Models of this silo's own, beside the global one; nothing of them leaves."""


@personal_app.command()
def train(
    data: Data = None, database: Database = None, config: Config = None, directory: Dir = None, as_json: Json = False
) -> None:
    """Train this silo's own models from what the agent has collected, and score them beside the newest global model.

    A round comes first: training stops when one begins, and the next call goes on after its last whole epoch.
    """
    from lorica_security.host.process_lock import ProcessLock
    from silo_agent.edges.personal.own_models import OwnModels
    from silo_agent.edges.personal.rounds_first import RoundsFirst
    from silo_agent.edges.personal.shown import own_models_facts, own_models_page
    from silo_agent.service.ports import WorkCancelled

    folder = silo_folder(directory)
    credentials = credentials_of(folder)
    settings = chosen(folder, data, database, config).settings(folder)
    if settings.personal.method == "none":
        raise ConfigurationError(
            f'[personal] method is "none" for {folder.root}: set it to "finetune", "ditto", "heads" or "adapters" in '
            "silo.toml"
        )
    own = OwnModels(folder.personal)
    with open_journal(folder, credentials) as journal:
        first = RoundsFirst(folder.lock, journal)
        first.require_rest()
        with _collected(folder, settings, journal.last_model()) as collected:
            own.make()
            with ProcessLock(own.lock, "training of this silo's own models"):
                # Here, not above: torch takes seconds to import.
                from silo_agent.edges.personal.own_training import OwnTraining

                sources, policy = silo_sources(folder, settings), policy_of(folder, credentials, settings)
                try:
                    scores = OwnTraining(
                        collected,
                        own,
                        settings=settings,
                        policy=policy,
                        sources=sources,
                        notice=lambda event, detail: print(f"{event}: {one_line(detail)}", file=sys.stderr),
                        cancelled=first.begun,
                    ).run()
                except WorkCancelled:
                    raise first.stopped() from None
    if as_json:
        print(json_text(own_models_facts(scores), indent=1))
        return
    own_models_page(scores).show(terminal())
    if scores.no_local:
        print(f"no local model: {scores.no_local}", file=sys.stderr)


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
    """Print the schema.json of a live database: every table that its role may read. What is left out is said on
    stderr."""
    from silo_agent.edges.workshop.database_schema import read_schema
    from silo_agent.sql_sandbox import parse_database

    live = read_schema(parse_database(url), db_id=db_id, only=only or ())
    for each in live.left_out:
        print(f"left out: {one_line(each)}", file=sys.stderr)
    print(json_text(live.entry, indent=1))


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


@contextmanager
def _collected(folder: SiloFolder, settings: "Settings", newest: "LastModel | None") -> "Iterator[Collected]":
    """The newest global model, which nothing prunes meanwhile, with its plan. Raises StateError where none is here."""
    from silo_agent.edges.disk.model_cache import ModelCache
    from silo_agent.edges.disk.plan_store import PlanStore
    from silo_agent.edges.personal.own_models import Collected
    from silo_agent.service.ports import RoundModel

    models = ModelCache(folder.models, kept=settings.storage.models_kept)
    header = models.header(newest.model) if newest else None
    bundle = PlanStore(folder.plans).load(newest.plan) if newest else None
    nothing = StateError("no global model is here yet: let `silo-agent start` take part in a round first")
    if newest is None or header is None or bundle is None or header.manifest.digest != newest.model:
        raise nothing
    with models.held(newest.model, folder.root) as file:
        if file is None:
            raise nothing
        model = RoundModel(file=file, manifest=header.manifest)
        yield Collected(bundle=bundle, newest=model, base=_base(models, bundle))


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
