"""Both daemons keep their memory to themselves before they read a key."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DUMPABLE = """
import ctypes, resource, sys
from {module} import main
sys.argv[1:] = {arguments!r}
try:
    main()
except SystemExit as end:
    print(end.code, ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE))
"""


def dumpable(module: str, arguments: list[str]) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    code = DUMPABLE.format(module=module, arguments=arguments)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("module", "command"),
    [("lorica_coordinator.cli", "serve"), ("silo_agent.cli", "start")],
    ids=["coordinator", "silo"],
)
def test_a_daemon_is_not_dumpable_and_writes_no_core_file_even_where_it_ends_at_its_first_key(
    module: str, command: str, tmp_path: Path
) -> None:
    assert dumpable(module, [command, "--dir", str(tmp_path)]) == "3 0 (0, 0)"


def test_a_command_that_only_looks_is_left_as_it_is(tmp_path: Path) -> None:
    assert dumpable("silo_agent.cli", ["status", "--dir", str(tmp_path)]).startswith("3 1 ")
