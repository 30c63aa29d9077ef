"""The `coordinator` commands that keep a federation for years: upgrade."""

from datetime import UTC, datetime
from typing import Annotated

import typer

from coordinator.command_line import Dir, enter_command, own_folder, say
from coordinator.edges.round_tables import TABLES_REVISION
from coordinator.settings import Settings
from security.process_lock import ProcessLock


def upgrade(
    to: Annotated[
        str, typer.Option(help="Revision of the tables; an older one before that release is put back.")
    ] = TABLES_REVISION,
    directory: Dir = None,
) -> None:
    """Bring the state to the tables of this release; a copy of the database is made first. The coordinator is stopped meanwhile."""
    from coordinator.edges.upgrade import upgrade as bring_to

    folder = own_folder(directory)
    database = Settings.read(folder.settings).state_folder / "state.sqlite"
    with ProcessLock(folder.lock, "coordinator"):
        enter_command(folder, "upgrade", to=to)
        done = bring_to(database, to=to, now=datetime.now(UTC))
    if done.copy is None:
        say(f"{database} has tables of revision {done.after}: nothing was to be done")
    else:
        say(f"{database} has tables of revision {done.after}, it had {done.before}; as it was it is in {done.copy}")
