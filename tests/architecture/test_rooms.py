"""A stranger finds a subject by the names of rooms and files: none is long, and each says what it is."""

import ast
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("coordinator", "silo_agent", "proto/silo_wire", "security/lorica_security", "ops/lorica")
MOST_LINES: Final = 500
LONG: Final = frozenset(
    {
        "coordinator/cli.py",  # one function a command
        "coordinator/rounds/machine.py",  # each of the four: one table of a protocol's states and events
        "silo_agent/rounds/machine.py",
        "security/lorica_security/secure_aggregation/coordinator_machine.py",
        "security/lorica_security/secure_aggregation/silo_machine.py",
    }
)
MODULES: Final = sorted(
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if not path.match("v1/*_pb2*") and "migrations" not in path.parts
)


def test_no_module_is_longer_than_it_has_a_reason_to_be() -> None:
    lines = {module: (ROOT / module).read_text(encoding="utf-8").count("\n") for module in MODULES}
    assert {module: count for module, count in lines.items() if count > MOST_LINES and module not in LONG} == {}


def test_each_module_and_room_begins_with_what_it_is() -> None:
    trees = {module: ast.parse((ROOT / module).read_text(encoding="utf-8")) for module in MODULES}
    assert [module for module, tree in trees.items() if not ast.get_docstring(tree)] == []
