"""The rooms of the house, for the pages: each package with the first sentence of its `__init__`."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

import lorica
import lorica_coordinator
import lorica_security
import silo_agent
import silo_wire

PACKAGES: Final[Mapping[str, ModuleType]] = {
    package.__name__: package for package in (lorica_coordinator, silo_agent, silo_wire, lorica_security, lorica)
}


def rows(package: str) -> Iterator[tuple[str, str]]:
    """(import name, sentence) of `package` and of every room in it; raises ValueError for a room that says nothing."""
    (top,) = PACKAGES[package].__path__
    for path in sorted(Path(top).rglob("__init__.py"), key=lambda path: path.parent.parts):
        name = ".".join((package, *path.parent.relative_to(top).parts))
        yield f"`{name}`", first_sentence(path)


def first_sentence(path: Path) -> str:
    """The first sentence of the module's docstring, on one line; raises ValueError where it has none."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path} does not say what the room is for: write one sentence as its docstring")
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s+(?=[A-Z`])", paragraph)[0].rstrip(".")
