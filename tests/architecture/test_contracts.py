"""The contracts of imports break where they should: holes are planted in a copy of the code, one at a time."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = (".", "proto", "security", "coordinator", "ops")
PACKAGES = (
    "proto/silo_wire",
    "security/lorica_security",
    "coordinator/lorica_coordinator",
    "silo_agent",
    "ops/lorica",
)
HOLES: dict[str, tuple[dict[str, str], str]] = {
    "a module in no layer of the coordinator": (
        {"coordinator/lorica_coordinator/stray.py": ""},
        "coordinator: commands > edges > service > rounds",
    ),
    "a room in no layer of its edges": (
        {"coordinator/lorica_coordinator/edges/stray/__init__.py": ""},
        "lorica_coordinator.edges: what is shown and checked > the server > sums > disk",
    ),
    "a room in no layer of the silo's edges": (
        {"silo_agent/edges/stray.py": ""},
        "silo_agent.edges: masks > groups > memory > keys > disk",
    ),
    "one side imports the other": (
        {"coordinator/lorica_coordinator/rounds/scores.py": "import silo_agent.rounds.states"},
        "lorica above the two programs, the wire below them, lorica_security the ground floor",
    ),
    "two modules of one room import each other": (
        {
            "silo_agent/edges/wire/planted.py": "import silo_agent.edges.wire.planted_too",
            "silo_agent/edges/wire/planted_too.py": "import silo_agent.edges.wire.planted",
        },
        "no circles, of rooms or of modules",
    ),
    "a core reads files": (
        {"coordinator/lorica_coordinator/rounds/terms.py": "import pathlib"},
        "the cores do no input or output, start nothing and read no clock",
    ),
    "aggregation knows the wire": (
        {"coordinator/lorica_coordinator/aggregation/delta_norm.py": "import silo_wire.transport"},
        "aggregation is pure maths",
    ),
    "a round knows dates": (
        {"silo_agent/rounds/update.py": "import datetime"},
        "the round machines know instants as numbers; only certificates know dates",
    ),
    "the simulation's randomness in a key": (
        {"security/lorica_security/secure_aggregation/keys/secret.py": "import random"},
        "no simulation randomness where it must protect; arrays only where vectors are masked or noised",
    ),
}


def looked_at(root: Path) -> dict[str, str]:
    """By contract: KEPT or BROKEN."""
    environment = {**os.environ, "PYTHONPATH": ":".join(CODE), "COLUMNS": "300"}
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    words = " ".join(done.stdout.split())
    names = re.findall(r'^name = "(.+)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    found = {name: re.search(re.escape(name) + r" (KEPT|BROKEN)", words) for name in names}
    return {name: match[1] for name, match in found.items() if match}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("holes")
    shutil.copy(ROOT / "pyproject.toml", root)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_breaks_its_contract(copied: Path, hole: str) -> None:
    files, contract = HOLES[hole]
    for name, code in files.items():
        path = copied / name
        path.parent.mkdir(exist_ok=True)
        kept = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).exists() else ""
        path.write_text(f"{kept}\n{code}\n", encoding="utf-8")
    try:
        assert looked_at(copied)[contract] == "BROKEN"
    finally:
        for name in files:
            if (ROOT / name).exists():
                shutil.copy(ROOT / name, copied / name)
            else:
                (copied / name).unlink()


def test_the_code_as_it_is_keeps_all_of_them() -> None:
    found = looked_at(ROOT)
    assert set(found.values()) == {"KEPT"}
    assert {contract for _, contract in HOLES.values()} <= set(found)
