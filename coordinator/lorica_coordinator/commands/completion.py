"""What a shell is told when somebody presses Tab: names of plans and silos, read from the coordinator's own folder.

Nothing is asked of a running coordinator and no key is opened. Where nothing can be known, nothing is offered.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import typer

from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder, chosen_folder
from lorica_coordinator.plans.plan_shelf import PlanShelf
from lorica_coordinator.settings import Settings
from lorica_security.errors import LoricaError

_BUSY_S = 0.2


def plan_names(context: typer.Context, incomplete: str) -> list[str]:
    state = _state(context)
    return [] if state is None else [name for name in PlanShelf(state).names() if name.startswith(incomplete)]


def silo_names(context: typer.Context, incomplete: str) -> list[str]:
    """Those that are enrolled."""
    state = _state(context)
    if state is None:
        return []
    address = f"file:{quote(str(state / 'state.sqlite'))}?mode=ro"
    try:
        with closing(sqlite3.connect(address, uri=True, timeout=_BUSY_S)) as store:
            names = [str(name) for (name,) in store.execute("SELECT silo FROM silos ORDER BY silo")]
    except sqlite3.Error:
        return []
    return [name for name in names if name.startswith(incomplete)]


def _state(context: typer.Context) -> Path | None:
    try:
        folder = CoordinatorFolder(chosen_folder(context.params.get("directory")))
        return Settings.read(folder.settings).state_folder
    except LoricaError:
        return None
