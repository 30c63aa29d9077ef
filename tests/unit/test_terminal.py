"""What commands print is what is there: brackets of names and help texts survive, and no table loses a value at any
width."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from lorica.documentation.docs_commands import PROGRAMS
from lorica_coordinator.cli import main as coordinator
from lorica_coordinator.edges.operator_host.watch_view import Seen, picture
from lorica_security.console.preflight import Check, Outcome
from lorica_security.console.preflight_page import check_page
from lorica_security.console.terminal import Page, show_table, terminal
from lorica_security.errors import ConfigurationError
from silo_wire.v1 import operator_pb2
from tests.support.command_line import run_command

ODD = "[bold]x[/] [policy] :cat: [/nothing]"
BOXES = re.compile("[\u2500-\u257f…]")


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    yield command, path
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*path, name))


COMMANDS = [
    pytest.param(program, path, command, id=" ".join((program, *path)))
    for program, app in PROGRAMS.items()
    for command, path in leaves(typer.main.get_command(app), ())
]


@pytest.mark.parametrize(("program", "path", "command"), COMMANDS)
def test_help_has_each_word_of_its_texts(program: str, path: tuple[str, ...], command: Any) -> None:
    shown = CliRunner().invoke(PROGRAMS[program], [*path, "--help"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0
    assert not BOXES.search(shown.output)
    for inner in getattr(command, "commands", {}).values():
        assert " ".join((inner.help or "").partition("\n\n")[0].split()) in " ".join(shown.output.split())
    words = set(shown.output.split())
    for text in (command.help or "", *(getattr(item, "help", None) or "" for item in command.params)):
        for bracketed in filter(re.compile(r"\[|\]").search, text.split()):
            assert any(bracketed in word for word in words), bracketed


def test_some_help_texts_name_sections() -> None:
    """Else the test above could not fail."""
    texts = [item.values[2].help or "" for item in COMMANDS]
    assert sum(bool(re.search(r"\[[a-z]+\]", text)) for text in texts) >= 2


def test_a_line_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    terminal().print(ODD, soft_wrap=True)
    terminal(stderr=True).print(ODD, soft_wrap=True)
    assert capsys.readouterr() == (f"{ODD}\n", f"{ODD}\n")


def test_a_folder_may_be_named_like_markup(tmp_path: Path) -> None:
    folder = tmp_path / "[bold]x" / ":cat:[red]"
    done = run_command(coordinator, "init", folder, "--no-plan", "--federation", "north", "--host", "192.0.2.1")
    assert done.code == 0, done.err
    assert str(folder) in done.out
    shown = run_command(coordinator, "check", "--dir", folder)
    assert str(folder) in shown.out + shown.err
    run_command(coordinator, "init", folder).is_refusal(ConfigurationError, str(folder))


def page(*, rows: int = 3, remark: str = "", name: str = "hospital-a") -> Page:
    columns = ("round", "outcome", "silo", "update", "examples", "loss reduction", "weight", "share", "exact match")
    cells = ("committed", "1234", "0.1234", "12345.67", "33.3%", "66.7%")
    made = [(f"{number}.1", "committed", name, *cells, "50.0%", remark) for number in range(rows)]
    numbers = (*columns[4:], "execution")
    return Page(
        columns=(*columns, "execution", "remark"), rows=made, numbers=("round", *numbers), groups=2, remarks=True
    )


def shown(page: Page, width: int, *, on_terminal: bool = True) -> str:
    out = io.StringIO()
    page.show(Console(file=out, force_terminal=on_terminal, width=width, markup=False, emoji=False, _environ={}))
    return re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("remark", ["", ODD, "it waits for whole release groups, and for nothing else at all " * 3])
def test_no_value_is_cut_on_a_terminal(width: int, remark: str) -> None:
    text = shown(page(remark=remark), width)
    assert "…" not in text
    for value in ("0.1", "1.1", "2.1", "hospital-a", "1234", "0.1234", "12345.67", "33.3%", "66.7%", "50.0%"):
        assert text.replace(",", " ").split().count(value) >= 1, value
    assert text.count("66.7%") == 3
    for word in remark.split():
        assert word in text


def test_at_80_columns_no_line_of_a_table_is_wider() -> None:
    assert max(map(len, shown(page(), 80).splitlines())) <= 80


def test_a_long_name_is_broken_but_whole() -> None:
    name = "a" * 63
    text = shown(page(rows=1, name=name), 80)
    assert text.count("a") - re.sub("a{2,}", "", text).count("a") == 63


def test_a_pipe_has_plain_columns() -> None:
    lines = shown(page(remark="all is well"), 80, on_terminal=False).splitlines()
    assert not BOXES.search("\n".join(lines))
    assert len(lines) == 4
    assert [re.split(" {2,}", line.strip()) for line in lines[:2]] == [
        list(page().columns),
        ["0.1", *page(remark="all is well").rows[0][1:]],
    ]


def test_an_empty_cell_of_a_pipe_is_a_column_still() -> None:
    _, line = shown(Page(columns=("a", "b", "c"), rows=[("1", "", "3")]), 80, on_terminal=False).splitlines()
    assert line.split() == ["1", "-", "3"]


@pytest.mark.parametrize("on_terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_others_say_is_shown_as_text(width: int, on_terminal: bool) -> None:
    checks = [Check(name=ODD, outcome=Outcome.PASSED, detail=f"{ODD}\x1b[2J\nand more")]
    text = " ".join(re.sub("[┃│]", " ", shown(check_page(checks, ODD), width, on_terminal=on_terminal)).split())
    for word in ODD.split():
        assert text.count(word) >= 2 - (width == 40), text
    assert "\x1b[2J" not in text


def test_the_coordinators_help_begins_with_what_comes_first() -> None:
    text = CliRunner().invoke(PROGRAMS["coordinator"], ["--help"]).output
    listed = [line.split()[0] for line in text.partition("Commands:")[2].splitlines() if line[2:3].strip()]
    assert listed[:3] == ["init", "invite", "serve"]
    assert {"revoke", "backup", "plan"} < set(listed)


def test_the_view_of_watch_loses_no_value_at_80_columns() -> None:
    silos = [
        operator_pb2.SiloStatus(silo=name, state="evaluating", fraction=0.4, last_seen_unix_s=1.0, detail=ODD)
        for name in ("a" * 63, "hospital-a")
    ]
    told = [
        operator_pb2.SiloRound(silo="hospital-a", outcome="committed", examples=10, loss_reduction=1234.5678)
        for _ in silos
    ]
    told.append(operator_pb2.SiloRound(silo="bank-b", outcome="evaluated"))  # which was asked for no update
    rounds = [
        operator_pb2.RoundRecord(
            round=100, attempt=12, outcome="committed", silos=told, macro_exact_match=1.0, micro_exact_match=0.123
        )
    ]
    status = operator_pb2.StatusReply(
        federation="north", plan_name=ODD, phase="collecting", round=100, rounds=120, silos=silos, seconds_left=33.0
    )
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, emoji=False, markup=False, _environ={})
    console.print(picture(Seen(status=status, rounds=rounds, at=0.0), lost="", now=1.0))
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert "…" not in text
    for value in (ODD, "hospital-a", "evaluating", "100.12", "committed", "1234.5678", "100.0%", "12.3%", "2 of 2"):
        assert value in " ".join(text.split()), text
    assert max(map(len, text.splitlines())) <= 80


def test_a_table_with_styles_is_whole_where_it_does_not_fit_and_plain_in_a_pipe() -> None:
    table = Table(title=ODD, title_style="dim")
    for name in ("silo", *(f"figure {number}" for number in range(9))):
        table.add_column(name, justify="left" if name == "silo" else "right")
    table.add_row(*([Text("1234.5678\n99%"), *["1234.5678"] * 9]), style="bold")
    for on_terminal, width in ((True, 80), (True, 200), (False, 80)):
        out = io.StringIO()
        console = Console(
            file=out, force_terminal=on_terminal, width=width, markup=False, emoji=False, highlight=False, _environ={}
        )
        show_table(console, table)
        text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
        assert ODD in text
        assert "…" not in text
        assert re.sub(r"[\s,]", "", text).count("1234.5678") == 10 or width == 80
        assert bool(BOXES.search(text)) is on_terminal
    assert [line.count("1234.5678") for line in text.splitlines()] == [0, 0, 10]
