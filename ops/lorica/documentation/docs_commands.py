"""What `--help` says, for the pages: each command of the three programs with its arguments, its options and their
defaults."""

from collections.abc import Iterator
from textwrap import fill
from typing import Any, Final

import typer.main

from lorica.cli import app as lorica_app
from lorica_coordinator.cli import app as coordinator_app
from silo_agent.cli import app as silo_app

PROGRAMS: Final[dict[str, typer.Typer]] = {"coordinator": coordinator_app, "silo-agent": silo_app, "lorica": lorica_app}
LEFT_OUT: Final = ("--help", "--dir ")
"""Options of every command, said once on the page."""


def help_block() -> str:
    """The names of all commands, one paragraph a program."""
    width = max(map(len, PROGRAMS)) + 2
    lines = [
        fill(" ".join(_words(name)), 110, initial_indent=f"{name:<{width}}", subsequent_indent=" " * width)
        for name in PROGRAMS
    ]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _words(program: str) -> Iterator[str]:
    """The commands behind one word in braces: `plan {new list}`."""
    for name, command in typer.main.get_command(PROGRAMS[program]).commands.items():  # type: ignore[attr-defined]
        yield f"{name} {{{' '.join(command.commands)}}}" if hasattr(command, "commands") else name


def rows(program: str) -> Iterator[tuple[str, str, str]]:
    """Command with its arguments, what it does, its options."""
    for path, command in _leaves(typer.main.get_command(PROGRAMS[program]), (program,)):
        context = typer.Context(command)
        arguments = [
            word
            for item in command.params
            if item.param_type_name == "argument"
            for word in item.get_usage_pieces(context)
        ]
        records = [item.get_help_record(context) for item in command.params if item.param_type_name == "option"]
        options = [
            f"`{names}` {_line(meaning)}".rstrip()
            for names, meaning in filter(None, records)
            if not names.startswith(LEFT_OUT)
        ]
        yield f"`{' '.join((*path, *arguments))}`", _line(command.help or ""), "; ".join(options)


def _line(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, inner in command.commands.items():
        yield from _leaves(inner, (*path, name))
