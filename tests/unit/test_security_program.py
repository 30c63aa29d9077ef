"""How a program begins: what it settles for libraries that read it once, as they are loaded."""

import os
import subprocess
import sys

import pytest

PROGRAMS = ("silo_agent.cli", "lorica_coordinator.cli", "lorica.cli")
BEGUN = """
import sys
from importlib import import_module
sys.argv = [sys.argv[1], "--version"]
try:
    import_module(sys.argv[0]).main()
except SystemExit:
    pass
assert "torch" not in sys.modules
import torch
"""


def turns_awake(program: str, **environment: str) -> int:
    """How often a thread of PyTorch's library looks for work in `program` before it sleeps, as that library itself says
    when it is loaded."""
    without = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", BEGUN, program],
        env={**without, "OMP_DISPLAY_ENV": "VERBOSE", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = {line.strip() for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line}
    return int(line.split("'")[1])


@pytest.mark.parametrize("program", PROGRAMS)
def test_threads_wait_asleep_so_that_two_agents_share_a_machine(program: str) -> None:
    assert turns_awake(program) == 0


def test_whoever_starts_a_program_may_have_it_otherwise() -> None:
    assert turns_awake("silo_agent.cli", OMP_WAIT_POLICY="ACTIVE") > 1_000_000
    assert turns_awake("silo_agent.cli", GOMP_SPINCOUNT="7") == 7
