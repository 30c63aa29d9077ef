"""Commands as a table: each is imported when it is given, so that help and small commands start at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from lorica_security.console.terminal import list_whole_summaries


@dataclass(frozen=True, slots=True)
class Row:
    """One command: `where` is `module:name` of its function, or of the Typer application of a group; `summary` is what
    lists say of it."""

    name: str
    where: str
    summary: str


def commands_of(*rows: Row) -> type[TyperGroup]:
    """What a Typer application takes as its class, to have the commands of `rows`, in their order."""

    class Table(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands = _Loaded(rows)  # type: ignore[assignment]  # nobody adds to it

        def list_commands(self, ctx: Any) -> list[str]:
            return [row.name for row in rows]

        def format_commands(self, ctx: Any, formatter: Any) -> None:
            """As typer's own, without loading any of them."""
            with formatter.section("Commands"):
                formatter.write_dl([(row.name, row.summary) for row in rows])

    return Table


class _Loaded(Mapping[str, Any]):
    """Each command under its name, loaded when it is asked for."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.name: row for row in rows}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(self._rows[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


def _load(row: Row) -> Any:
    module, _, name = row.where.partition(":")
    found = getattr(import_module(module), name)
    around = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)  # help texts name [sections] of files
    if isinstance(found, typer.Typer):
        around.add_typer(found, name=row.name)
    else:
        around.command(name=row.name)(found)
    list_whole_summaries(around)
    return typer.main.get_group(around).commands[row.name]
