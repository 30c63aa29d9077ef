"""The breaks of tests/breaks/*.toml: a file per subject, in each the breaks that a test or the conformity audit has to
find.

    [[break]]
    name        what is broken, in a few words; no two are alike
    why         one sentence: what an adversary would gain
    file        what is changed, from the repository's root
    before      text that occurs there exactly once
    after       what stands there instead
    caught_by   node ids of tests, each of which fails
    audit       promises of the conformity audit, each of which is found broken
    explained   why nothing can find it

A break has one of the last three, or tests and promises both.
"""

import ast
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CODE = (".", "proto", "security", "coordinator", "ops")
"""Folders that modules are imported from."""
PAGE = ROOT / "ops/docs/breaks.md"
TABLE_BEGINS, TABLE_ENDS = "<!-- breaks -->\n", "<!-- end of breaks -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One break, of the file `subject`.toml."""

    subject: str
    name: str
    why: str
    file: str
    before: str
    after: str
    caught_by: tuple[str, ...] = ()
    audit: tuple[str, ...] = ()
    explained: str = ""

    def planted(self, content: str) -> str:
        """The file's `content` with the break; raises ValueError unless `before` occurs in it exactly once, and what is
        Python parses."""
        if (count := content.count(self.before)) != 1:
            raise ValueError(
                f"{self.name!r}: its text occurs {count} times in {self.file}: write it anew, so that it is there once"
            )
        changed = content.replace(self.before, self.after)
        if changed == content:
            raise ValueError(f"{self.name!r} changes nothing in {self.file}: before and after are the same")
        if self.file.endswith(".py"):
            try:
                ast.parse(changed)
            except SyntaxError as error:
                raise ValueError(f"{self.name!r} leaves {self.file} without sense: {error}") from error
        return changed


def breaks_of(subject: str) -> list[Break]:
    """Those of one file, in order; raises ValueError for one that is not as the head of this module says."""
    with (HERE / f"{subject}.toml").open("rb") as file:
        tables = tomllib.load(file)["break"]
    known = {field.name for field in fields(Break)} - {"subject"}
    made = []
    for table in tables:
        if unknown := set(table) - known:
            raise ValueError(
                f"{subject}.toml, {table.get('name')!r}: key {min(unknown)!r} is unknown: use "
                f"{', '.join(sorted(known))}"
            )
        lists = {key: tuple(table[key]) for key in ("caught_by", "audit") if key in table}
        made.append(Break(subject=subject, **{**table, **lists}))
    for one in made:
        if bool(one.caught_by or one.audit) == bool(one.explained):
            raise ValueError(f"{subject}.toml, {one.name!r}: say what finds it, or explain why nothing does")
    return made


def subjects() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.toml"))


def all_breaks() -> list[Break]:
    """By subject; raises ValueError where two have one name."""
    made = [one for subject in subjects() for one in breaks_of(subject)]
    names = [one.name for one in made]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"two breaks have the name {min(twice)!r}: rename one")
    return made


def table() -> str:
    """Of ops/docs/breaks.md: how many breaks there are of each subject, and what finds them."""
    rows = [
        "| subject | breaks | found by tests | by the audit alone | explained |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    rows += [_row(subject.replace("_", " "), breaks_of(subject)) for subject in subjects()]
    return "\n".join([*rows, _row("together", all_breaks())]) + "\n"


def _row(subject: str, of: Sequence[Break]) -> str:
    by_tests = sum(bool(one.caught_by) for one in of)
    by_audit = sum(bool(one.audit) and not one.caught_by for one in of)
    return f"| {subject} | {len(of)} | {by_tests} | {by_audit} | {sum(bool(one.explained) for one in of)} |"


def page() -> str:
    """ops/docs/breaks.md with the table as it has to be."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(TABLE_BEGINS)
    _, after = rest.split(TABLE_ENDS)
    return f"{before}{TABLE_BEGINS}\n{table()}\n{TABLE_ENDS}{after}"


def named_tests(file: str) -> Iterator[str]:
    """Node ids of the tests in a file, without parameters, as its text has them."""
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield f"{file}::{node.name}"
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.name.startswith("test_"):
                    yield f"{file}::{node.name}::{inner.name}"
