"""Each side's packages import what its extra installs, and nothing of the other side's."""

import ast
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OURS = {"lorica_coordinator", "lorica", "lorica_security", "silo_agent", "silo_wire"}
BOTH = ("security/lorica_security", "proto/silo_wire")
SIDES = {"coordinator": ("coordinator",), "silo": ("silo_agent",), "lab": ("coordinator", "silo_agent", "ops/lorica")}
ELSEWHERE = {"flwr", "nvflare"}
"""What only runs inside a benchmark's peer, which is installed there."""
PARTS = {"annotated-types", "httpx2", "huggingface-hub", "safetensors", "tokenizers"}
"""What Transformers and pydantic cannot be installed without, imported by itself."""


def named(lines: list[str]) -> set[str]:
    return {re.sub(r"[-_.]+", "-", Requirement(line).name).lower() for line in lines}


def extra(name: str) -> set[str]:
    """Distributions that the extra brings, with what it names of ours."""
    found: set[str] = set()
    for line in EXTRAS[name]:
        requirement = Requirement(line)
        found |= set().union(*map(extra, requirement.extras)) if requirement.name == "lorica" else named([line])
    return found


def imported(folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Each third-party distribution that a module imports, with the module."""
    distributions = packages_distributions()
    for folder in folders:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for module in modules:
                    top = module.partition(".")[0]
                    if top == "google":
                        yield "protobuf", str(path.relative_to(ROOT))
                    elif top in distributions and top not in OURS | ELSEWHERE:
                        yield distributions[top][0].lower().replace("_", "-"), str(path.relative_to(ROOT))


@pytest.mark.parametrize("side", SIDES)
def test_a_side_imports_nothing_that_its_extra_does_not_install(side: str) -> None:
    installed = named(PROJECT["dependencies"]) | extra(side) | PARTS
    optional = extra("token") | extra("postgresql")
    if side != "coordinator":
        optional |= extra("cluster") | extra("import") | extra("serving") | extra("text") | extra("tracking")
    assert [(name, where) for name, where in imported((*BOTH, *SIDES[side])) if name not in installed | optional] == []


@pytest.mark.parametrize(("side", "other"), [("coordinator", "silo"), ("silo", "coordinator")])
def test_what_one_side_alone_needs_is_not_installed_for_the_other(side: str, other: str) -> None:
    used = {name for name, _ in imported((*BOTH, *SIDES[side]))}
    assert extra(other) - PARTS <= extra(other) - used, "it is needed on both sides: a dependency, no extra"
    common = named(PROJECT["dependencies"])
    assert common - {name for name, _ in imported((*BOTH, "coordinator"))} == set(), "the coordinator never imports it"
    assert common - {name for name, _ in imported((*BOTH, "silo_agent"))} == set(), "the silo agent never imports it"


def test_the_installed_metadata_says_the_same() -> None:
    said = {line.partition(";")[0].strip() for line in requires("lorica") or () if "extra ==" not in line}
    assert named(list(said)) == named(PROJECT["dependencies"])
