"""A stranger finds a subject by the names of rooms and files: none is long, and each says what it is."""

import ast
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = (
    "coordinator/lorica_coordinator",
    "silo_agent",
    "proto/silo_wire",
    "security/lorica_security",
    "ops/lorica",
)
MOST_LINES: Final = 500
MOST_MODULES: Final = 12
MODULES: Final = sorted(
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.match("v1/*_pb2*") and "migrations" not in path.parts
)


def test_no_module_is_long() -> None:
    lines = {module: (ROOT / module).read_text(encoding="utf-8").count("\n") for module in MODULES}
    assert {module: count for module, count in lines.items() if count > MOST_LINES} == {}


def test_no_room_has_more_modules_than_a_reader_takes_in() -> None:
    rooms = Counter(str(Path(module).parent) for module in MODULES if not module.endswith("__init__.py"))
    assert {room: count for room, count in rooms.items() if count > MOST_MODULES} == {}


def test_each_module_and_room_begins_with_what_it_is() -> None:
    trees = {module: ast.parse((ROOT / module).read_text(encoding="utf-8")) for module in MODULES}
    assert [module for module, tree in trees.items() if not ast.get_docstring(tree)] == []
