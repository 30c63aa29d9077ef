"""What commands print for people: words as they are, and tables that are whole at any width and in a pipe.

Nothing that is printed is markup: a folder may be named `[bold]x[/]` or `:cat:`, and a peer may say anything.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

EMPTY = "-"
"""What an empty cell is in a pipe: each line has all columns."""
LEAST_FOR_REMARKS = 30
"""Characters a line beside the other columns; where there are fewer, remarks are in lines below."""


def terminal(*, stderr: bool = False) -> Console:
    """A console that changes no word: no markup, no emoji codes, no colours for numbers."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def list_whole_summaries(app: Any) -> None:
    """Have the lists of commands of a Typer application say each command's whole first paragraph, which they cut
    otherwise."""
    for command in app.registered_commands:
        command.short_help = inspect.cleandoc(command.callback.__doc__).partition("\n\n")[0]
    for group in app.registered_groups:
        group.short_help = group.typer_instance.info.help
        list_whole_summaries(group.typer_instance)


def one_line(value: object) -> str:
    """As it is shown: what others say moves no cursor and paints nothing."""
    return "".join(character if character.isprintable() else " " for character in str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Rows under the names of their columns.

    On a terminal that is too narrow, rows that are alike in the first `groups` columns are a table of their own under
    these, and the last column, if it is `remarks`, is in lines below.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    """Columns that are aligned to the right."""
    groups: int = 0
    remarks: bool = False
    title: str = ""

    def show(self, out: Console) -> None:
        """Plain columns where no terminal is; nothing is cut in any case."""
        rows = [[one_line(cell) for cell in row] for row in self.rows]
        certain = len(self.columns) - self.remarks
        widths = _widths([self.columns, *rows])
        if not out.is_terminal:
            self._plain(out, rows, widths)
        elif (
            sum(widths[:certain]) + 3 * len(widths) + 1 + self.remarks * min(widths[-1], LEAST_FOR_REMARKS) <= out.width
        ):
            table = Table(title=Text(self.title) if self.title else None)
            for number, name in enumerate(self.columns):
                table.add_column(Text(name), justify=self._side(name), no_wrap=number < certain, overflow="fold")
            for row, after in zip(rows, [*rows[1:], None], strict=True):
                ends = after is not None and after[: self.groups] != row[: self.groups]
                table.add_row(*map(Text, row), end_section=ends)
            out.print(table)
        else:
            self._narrow(out, rows)

    def _plain(self, out: Console, rows: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
        for line in (
            *([self.columns] if any(self.columns) else []),
            *([cell or EMPTY for cell in row] for row in rows),
        ):
            cells = (
                cell.rjust(width) if name in self.numbers else cell.ljust(width)
                for name, cell, width in zip(self.columns, line, widths, strict=True)
            )
            out.print("  ".join(cells).rstrip(), soft_wrap=True)

    def _narrow(self, out: Console, rows: Sequence[Sequence[str]]) -> None:
        if self.title:
            out.print(self.title, soft_wrap=True)
        last = len(self.columns) - self.remarks
        columns = self.columns[self.groups : last]
        shown = [row[self.groups : last] for row in rows]
        widths = _within(out.width, _widths([columns, *shown]), _longest_words([columns, *shown]))
        for head in dict.fromkeys(tuple(row[: self.groups]) for row in rows):
            if head:
                told = zip(self.columns, head, strict=False)
                out.print(", ".join(f"{name} {cell}" for name, cell in told if cell), soft_wrap=True)
            table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
            for name, width in zip(columns, widths, strict=True):
                table.add_column(Text(name), justify=self._side(name), overflow="fold", width=width)
            for row in rows:
                if tuple(row[: self.groups]) == head:
                    table.add_row(*map(Text, row[self.groups : last]))
            out.print(table)
            for row in rows:
                if self.remarks and row[-1] and tuple(row[: self.groups]) == head:
                    out.print(f"{row[self.groups]}: {row[-1]}", soft_wrap=True)

    def _side(self, name: str) -> JustifyMethod:
        return "right" if name in self.numbers else "left"


def show_table(out: Console, table: Table) -> None:
    """A table that has styles of its own, where it fits; else as a Page."""
    if out.is_terminal and Measurement.get(out, out.options.update(max_width=1_000_000), table).maximum <= out.width:
        out.print(table)
        return
    columns = [_plain_text(column.header) for column in table.columns]
    rows = list(zip(*([_plain_text(cell) for cell in column.cells] for column in table.columns), strict=True))
    numbers = [name for name, column in zip(columns, table.columns, strict=True) if column.justify == "right"]
    if table.title:
        out.print(_plain_text(table.title), soft_wrap=True)
    Page(columns=columns, rows=rows, numbers=numbers).show(out)


def _plain_text(cell: object) -> str:
    return ", ".join((cell.plain if isinstance(cell, Text) else str(cell)).splitlines())


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(1, *map(cell_len, column)) for column in zip(*lines, strict=True)]


def _longest_words(lines: Sequence[Sequence[str]]) -> list[int]:
    return _widths([[max(cell.split(), key=cell_len, default="") for cell in line] for line in lines])


def _within(width: int, natural: Sequence[int], words: Sequence[int]) -> list[int]:
    """Widths of columns that fit, two characters apart: cells are wrapped between words first, and within them where
    they must."""
    widths = list(natural)
    room = max(width - 2 * (len(widths) - 1), len(widths))
    while sum(widths) > room:
        between = max(range(len(widths)), key=lambda at: widths[at] - words[at])
        if widths[between] <= words[between]:
            between = max(range(len(widths)), key=lambda at: widths[at])
        widths[between] -= 1
    return widths
