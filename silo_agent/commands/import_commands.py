"""`silo-agent import`: a data folder made of data as people have it, shown before it is written."""

import hashlib
import sys
import textwrap
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.console.terminal import terminal
from lorica_security.errors import ConfigurationError, DataError, StateError
from lorica_security.host.files import require_free
from lorica_security.visible_text import visible
from silo_agent.edges.data_import.findings import Findings
from silo_agent.edges.data_import.sources import Format

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from silo_agent.edges.data_import.examples import Imported
    from silo_agent.edges.data_import.splits import Division
    from silo_agent.training.data.schema import Schema

SHOWN_ROWS = 10
SHOWN_CHARACTERS = 300
"""Of each text of a row that is shown."""


class ImportedTask(Enum):
    SQL = "sql"
    TEXT = "text-to-text"


def import_data(
    source: Annotated[
        Path, typer.Argument(help="A file (.csv .tsv .jsonl .json .parquet .arrow) or a folder of them.")
    ],
    pairs: Annotated[list[str] | None, typer.Argument(metavar="[KEY=COLUMN]...", help="More of --map.")] = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="The data folder to make; it must not be there, or be empty.")],
    task: Annotated[
        ImportedTask, typer.Option("--task", help="sql: questions and SQL; text-to-text: inputs and targets.")
    ] = ImportedTask.SQL,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="KEY=COLUMN",
            help="Where the source has a key: question, query (or input, target), id, db_id, or one to keep, such as "
            "patient. Default: the column of its name.",
        ),
    ] = None,
    schema: Annotated[
        Path | None, typer.Option("--schema", help="A schema.json, or a tables.json as Spider and BIRD have it.")
    ] = None,
    database: Annotated[
        str | None, typer.Option("--database", help="Or the database itself: sqlite:///PATH or postgresql://...")
    ] = None,
    db_id: Annotated[
        str | None, typer.Option("--db-id", help="The database that lines without a db_id are to.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="DB_ID", help="Take the questions to this database alone; repeatable."),
    ] = None,
    kind: Annotated[
        Format | None, typer.Option("--format", help="Default: by the suffix of a file, the layout of a folder.")
    ] = None,
    encoding: Annotated[
        str, typer.Option("--encoding", help="Of text files that do not begin with a byte order mark.")
    ] = "utf-8",
    split_by: Annotated[
        str | None,
        typer.Option(
            "--split-by",
            help="`template` of the SQL (of text-to-text the input), a KEY whose values stay together, or `source`. "
            "Default: source if it has splits, else template.",
        ),
    ] = None,
    dev: Annotated[float, typer.Option("--dev", min=0.001, max=0.5, help="Share of the lines for dev.")] = 0.1,
    test: Annotated[float, typer.Option("--test", min=0.0, max=0.4, help="Share of the lines for test.")] = 0.1,
    new_ids: Annotated[bool, typer.Option("--new-ids", help="Make ids although there is a column id.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Write without asking.")] = False,
) -> None:
    """Make a data folder of data as you have it: CSV, TSV, JSON, Parquet, Hugging Face data sets, Spider, BIRD.

    All problems are told at once, with file and line, and nothing is written then. Otherwise ten rows are shown and you
    are asked.
    """
    from silo_agent.edges.data_import.examples import SQL, TEXT, Choices, Importer, mapping
    from silo_agent.edges.data_import.schemas import NO_SCHEMAS, schemas_of
    from silo_agent.edges.data_import.sources import find_source
    from silo_agent.edges.data_import.splits import SOURCE, TEMPLATE, divide
    from silo_agent.edges.data_import.text_files import checked_encoding
    from silo_agent.edges.data_import.written import write_folder

    require_free(out)
    keys = mapping((*(columns or ()), *(pairs or ())))
    form = SQL if task is ImportedTask.SQL else TEXT
    if not form.databases:
        _require_unused({"--schema": schema, "--database": database, "--db-id": db_id, "--only": only}, task)
    if split_by and split_by not in (SOURCE, TEMPLATE, *form.keys):
        keys.setdefault(split_by, split_by)
    choices = Choices(
        form=form,
        columns=keys,
        encoding=checked_encoding(encoding),
        db_id=db_id,
        only=tuple(only or ()),
        new_ids=new_ids,
    )
    findings = Findings()
    found = find_source(source, kind)
    schemas = NO_SCHEMAS
    if form.databases:
        schemas = schemas_of(found, file=schema, database=database, db_id=db_id, findings=findings)
    importer = Importer(found, choices, schemas, findings)
    for file in found.files:
        importer.read(file)
    used = importer.schemas()
    _require_sound(findings, source)
    if not importer.examples:
        raise DataError(f"{source} holds no question to {visible(', '.join(choices.only))}: correct --only")
    division = divide(importer.examples, by=split_by, shares={"dev": dev, "test": test})
    _show(importer.examples, division, findings, used)
    if not yes and not _agreed(out):
        raise StateError(f"{out} was not made: answer y, or give --yes")
    write_folder(out, division, used)
    lines = ", ".join(f"{len(examples):,} {name}" for name, examples in division.splits.items() if examples)
    tables = f", and schema.json of {_databases(used)}" if used else ""
    print(f"{visible(str(out))} holds {lines} examples{tables}")
    print(f"next: silo-agent check --data {visible(str(out))}{' --database URL' if database else ''}")


def _require_unused(options: "Mapping[str, object]", task: ImportedTask) -> None:
    """Raises ConfigurationError for an option that lines of `task` have no use for."""
    if given := [option for option, value in options.items() if value]:
        raise ConfigurationError(
            f"{given[0]} says what questions are to, and lines of --task {task.value} are to no database: leave it out"
        )


def _require_sound(findings: Findings, source: Path) -> None:
    """Raises DataError after everything that was found was printed."""
    if not (count := findings.problems):
        return
    for line in (*map(visible, findings.remarks), *findings.shown()):
        print(line, file=sys.stderr)
    raise DataError(
        f"{source} has {count:,} problem{'s' * (count > 1)}, told above: nothing was written; correct the data and "
        "import again"
    )


def _show(examples: "Sequence[Imported]", division: "Division", findings: Findings, used: "Sequence[Schema]") -> None:
    """Ten rows from all over the source, and what is to be known before they are written; as wide as the terminal."""
    split = {example.id: name for name, lines in division.splits.items() for example in lines}
    width = terminal().width
    chosen = {example.id for example in sorted(examples, key=_chance)[:SHOWN_ROWS]}
    print(f"{len(chosen)} of {len(examples):,} rows, from all over the source:")
    for number, example in enumerate((example for example in examples if example.id in chosen), 1):
        print(f"{number:>3}  {visible(example.place)}, for {split[example.id]}")
        for key, text in example.values.items():
            if key != "db_id" or len(used) > 1:
                _print_text(key, text, width)
    for remark in findings.remarks:
        print(visible(remark))
    lines = ", ".join(f"{len(part):,} {name}" for name, part in division.splits.items() if part)
    print(f"divided {division.how}: {lines}")
    for leak in division.leaks:
        print(f"leakage: {leak}")
    if not division.leaks:
        print("leakage: none was found; no question, template or value kept of dev or test is in train")


def _chance(example: "Imported") -> bytes:
    """An order that has nothing to do with the source's, and is the same each time."""
    return hashlib.sha256(example.line()).digest()


def _print_text(key: str, text: str, width: int) -> None:
    """Under its key, with escapes for what does not print; cut, with its length, where it is long."""
    cut = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}... ({len(text):,} characters)"
    print(
        textwrap.fill(
            visible(cut),
            width,
            initial_indent=f"     {key:<9} ",
            subsequent_indent=" " * 15,
            break_on_hyphens=False,
        )
    )


def _agreed(out: Path) -> bool:
    print(f"write them to {visible(str(out))}? [y/N] ", end="", flush=True)
    return sys.stdin.readline(100).strip().lower() in ("y", "yes")


def _databases(schemas: "Sequence[Schema]") -> str:
    return f"database {visible(schemas[0].db_id)}" if len(schemas) == 1 else f"{len(schemas)} databases"
