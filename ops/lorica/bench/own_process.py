"""What is measured in a process of its own: nothing of what was measured before is in its memory."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from lorica_security.errors import StateError


def measured_apart(module: str, task: Mapping[str, object], *, name: str) -> Any:
    """What `python -m module`, given `task` in JSON on its standard input, prints in JSON as its last line; raises
    StateError with `name` where it fails."""
    done = subprocess.run(
        [sys.executable, "-m", module], input=json.dumps(task), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}: more memory is needed?"]
        raise StateError(f"{name}: {last[0]}")
    return json.loads(done.stdout.splitlines()[-1])
