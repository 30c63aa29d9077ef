"""The logs that the processes of a test leave: a JSON object per line."""

import json
from pathlib import Path
from typing import Any


def logged(log: Path, event: str) -> list[dict[str, Any]]:
    """The records of one kind; a line that a kill cut off is none."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("event") == event:
            found.append(record)
    return found
