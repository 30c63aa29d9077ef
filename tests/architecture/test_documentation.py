"""README, CONTRIBUTING, SECURITY and ops/docs say what is so: commands and options exist, links lead somewhere, samples
parse, tables are current."""

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer.main

from lorica.cli import app as lorica_app
from lorica.documentation import docs_pages, markdown, rooms, settings_fields, settings_tables
from lorica.experiments.definition import Study
from lorica_coordinator.cli import app as coordinator_app
from lorica_coordinator.plans.presets import preset
from lorica_coordinator.settings import Settings as CoordinatorSettings
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import DataError
from silo_agent.cli import app as silo_app
from silo_agent.settings import Settings as SiloSettings
from silo_agent.sql_sandbox import Limits, Sandbox, parse_database
from silo_agent.training.data.text_to_sql_data import DataLimits, load_silo_data
from silo_agent.training.tasks.text_to_text import TEXT_TO_TEXT
from silo_agent.training.tasks.wikisql import WIKISQL
from silo_wire.plans.plan import Plan
from silo_wire.plans.sections.model import ModelSection
from tests.support.postgresql import running_postgresql

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "ops" / "docs"
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted(DOCS.rglob("*.md"))]
APPS: dict[str, Any] = {
    "coordinator": typer.main.get_command(coordinator_app),
    "silo-agent": typer.main.get_command(silo_app),
    "lorica": typer.main.get_command(lorica_app),
}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PROMPT = re.compile(r"^[a-z]*\$ (.*)$", re.MULTILINE)
INLINE = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
TEST = re.compile(r"(tests/[a-z_0-9/]+\.py)(?:::(test_[a-z_0-9]+))?")
ENVIRONMENT = re.compile(r"[A-Z_]+=\S+")
DIGEST = "0" * 64


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in FENCE.findall(page.read_text(encoding="utf-8")) if kind == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def written_commands(page: Path) -> Iterator[str]:
    """What a reader would type: lines of shell blocks, lines behind `$ ` or `HOST$ `, and code in the running text."""
    for text in blocks(page, "sh"):
        yield from text.splitlines()
    for text in blocks(page, "console"):
        yield from PROMPT.findall(text)
    yield from INLINE.findall(prose(page))


def subcommand(tokens: list[str]) -> tuple[Any, list[str]]:
    """The command that `tokens` call, and what follows it; raises KeyError naming what does not exist."""
    command, rest = APPS[tokens[0]], tokens[1:]
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            raise KeyError(f"{' '.join(tokens)}: there is no command {rest[0]!r}")
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def options_of(command: Any) -> set[str]:
    return {
        name
        for item in command.params
        if item.param_type_name == "option"
        for name in (*item.opts, *item.secondary_opts)
    } | {"--help"}


def every_command(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            yield from every_command(inner, (*path, name))
    else:
        yield path, command


def calls(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(text, tokens) of every call of one of our commands on the page."""
    for text in written_commands(page):
        try:
            tokens = shlex.split(text, comments=True)
        except ValueError:
            continue  # no shell command: an apostrophe in a message
        while tokens and ENVIRONMENT.fullmatch(tokens[0]):
            tokens = tokens[1:]
        if tokens and tokens[0] in APPS:
            yield text, tokens


# --- commands and options


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_command_and_option_on_the_page_exists(page: Path) -> None:
    for text, tokens in calls(page):
        command, rest = subcommand(tokens)
        for token in rest:
            if token.startswith("--"):
                assert token.partition("=")[0] in options_of(command), text


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_option_that_stands_alone_belongs_to_some_command(page: Path) -> None:
    known = {
        option for name, app in APPS.items() for _, one in every_command(app, (name,)) for option in options_of(one)
    }
    alone = {text.split()[0].partition("=")[0] for text in INLINE.findall(prose(page)) if text.startswith("--")}
    assert alone <= known


def test_every_command_is_documented() -> None:
    written = {" ".join(tokens) for page in PAGES for _, tokens in calls(page)}
    for name in ("coordinator", "silo-agent"):
        for path, _ in every_command(APPS[name], (name,)):
            call = " ".join(path)
            assert any(text == call or text.startswith(f"{call} ") for text in written), f"{call} stands on no page"


def test_every_option_is_documented_or_explains_itself() -> None:
    for name, app in APPS.items():
        for path, command in every_command(app, (name,)):
            for item in command.params:
                if item.param_type_name == "option" and item.name != "help":
                    assert item.help, f"{' '.join(path)} {item.opts[0]} has no help text"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_make_target_on_the_page_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for text in written_commands(page):
        if text.startswith("make "):
            assert text.split()[1] in targets, text


def test_a_command_that_does_not_exist_is_found() -> None:
    with pytest.raises(KeyError, match="vanish"):
        subcommand(["coordinator", "plan", "vanish"])


# --- links and tests


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            assert anchor in headings(file), target


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    for file, name in TEST.findall(prose(page)):
        assert (ROOT / file).is_file(), file
        if name:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_the_threat_model_names_every_file_that_plays_attacks() -> None:
    named_here = {file for file, _ in TEST.findall(prose(DOCS / "threat-model.md"))}
    played = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_attacks_on_*.py")}
    assert played <= named_here


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    lines = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


# --- samples


def samples(language: str) -> list[tuple[Path, str]]:
    return [(page, text) for page in PAGES for text in blocks(page, language)]


@pytest.mark.parametrize(
    ("page", "text"), samples("toml"), ids=lambda value: named(value) if isinstance(value, Path) else ""
)
def test_every_sample_toml_parses_with_the_real_models(page: Path, text: str) -> None:
    match text.partition("\n")[0]:
        case "# silo.toml":
            SiloSettings.model_validate(tomllib.loads(text))
        case "# federation.toml":
            CoordinatorSettings.parse(text, named(page))
        case "# study.toml":
            parse_toml(Study, text, named(page))
        case "# plan.toml":
            values = {
                "name": "sample",
                "federation": "sample",
                "model": MODEL,
                **preset("default"),
                **tomllib.loads(text),
            }
            Plan.model_validate(values)
        case other:
            pytest.fail(f"{named(page)}: a sample begins with {other!r}, not with the name of its file")


MODEL = {
    "source": "size:mini",
    "parameters": 1,
    "layout": DIGEST,
    "initial": DIGEST,
    "files": {"config.json": DIGEST, "layout.json": DIGEST},
}


def test_the_sample_data_set_is_one(tmp_path: Path) -> None:
    lines, of_wikisql, of_text = blocks(DOCS / "silo.md", "jsonl")
    (schema,) = blocks(DOCS / "silo.md", "json")
    (tmp_path / "train.jsonl").write_text(lines)
    (tmp_path / "dev.jsonl").write_text(lines.replace('"p-', '"d-'))
    (tmp_path / "schema.json").write_text(schema)
    data = load_silo_data(tmp_path)
    assert len(data.train) == len(lines.splitlines())
    assert not data.bad_lines
    (tmp_path / "schema.json").unlink()
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text(of_wikisql.replace('"w-', f'"{split}-'))
    assert not WIKISQL.data(tmp_path, DataLimits(max_bad_fraction=0)).bad_lines
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text(of_text.replace('"t-', f'"{split}-'))
    assert not TEXT_TO_TEXT.data(tmp_path, DataLimits(max_bad_fraction=0)).bad_lines


def test_the_documented_role_reads_and_cannot_write() -> None:
    (statements,) = blocks(DOCS / "silo.md", "sql")
    with running_postgresql() as server:
        server.execute("CREATE TABLE patient (name text)", "INSERT INTO patient VALUES ('ada')")
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url(user="lorica_reader"))
        server.execute(*(line for line in statements.splitlines() if line))
        target = parse_database(server.url(user="lorica_reader", password="a long random password"))
        with Sandbox(target, Limits()) as box:
            assert box.run("SELECT name FROM patient").rows == (("ada",),)
        server.execute("GRANT INSERT ON patient TO lorica_reader")
        with pytest.raises(DataError, match="may write"), Sandbox(target, Limits()) as box:
            box.run("SELECT name FROM patient")


# --- tables made from the code


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_table_is_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert docs_pages.rendered(text) == text, "run make docs"


def test_every_table_stands_on_some_page() -> None:
    on_pages = [name for page in PAGES for name in docs_pages.tables_of(page.read_text(encoding="utf-8"))]
    assert sorted(on_pages) == sorted(docs_pages.TABLES)


@pytest.mark.parametrize("name", docs_pages.PICTURES)
def test_every_picture_is_current(name: str) -> None:
    assert (markdown.DOCS / name).read_text(encoding="utf-8") == docs_pages.PICTURES[name](), "run make docs"


def test_a_page_that_fell_behind_is_brought_up_to_date(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    page.write_text("before\n<!-- table: metrics -->\nold\n<!-- end of table -->\nafter\n")
    assert docs_pages.write_pages(tmp_path) == [page]
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| `lorica_round` | gauge |" in text
    assert docs_pages.write_pages(tmp_path) == []


def test_meanings_and_units_name_keys_that_exist() -> None:
    plan = {key for key, _ in settings_fields.leaves(Plan)}
    silo = {key for key, _ in settings_fields.leaves(SiloSettings)}
    assert set(settings_tables.PLAN_UNITS) <= plan
    assert set(settings_tables.SILO_MEANINGS) == silo
    assert set(settings_tables.MODEL_MEANINGS) == set(ModelSection.model_fields)


def test_every_key_that_a_person_sets_has_a_meaning() -> None:
    for table in (settings_tables.plan_table, settings_tables.federation_table, settings_tables.silo_table):
        for row in table().splitlines()[2:]:
            assert not row.endswith("| |"), row


def test_a_room_is_told_by_the_first_sentence_of_its_init(tmp_path: Path) -> None:
    init = tmp_path / "__init__.py"
    init.write_text('"""Bonawitz et al. 2017,\nas built. No I/O here.\n\nMore."""\n')
    assert rooms.first_sentence(init) == "Bonawitz et al. 2017, as built"


def test_a_room_that_says_nothing_is_refused(tmp_path: Path) -> None:
    init = tmp_path / "__init__.py"
    init.write_text("import os\n")
    with pytest.raises(ValueError, match="does not say what the room is for"):
        rooms.first_sentence(init)
