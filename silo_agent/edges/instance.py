"""Which process of which agent attends: 8 random bytes that stay with the silo's folder, then the number of this start.

The folder's lock lets one process at a time start there, so a higher number is a restart of a process that has ended,
even where the coordinator has not heard its end: after a power cut, or behind a network that broke. It gives the
restarted agent its seat at once. A second agent, which runs from a folder of its own, is still told that it is one; of a
folder and its copy the one that started more often stays.
"""

import secrets

from security.errors import StorageError
from silo_agent.edges.round_journal import RoundJournal

_FOLDER_BYTES = 8
_FOLDER, _STARTS = "instance_folder", "instance_starts"


def next_instance(journal: RoundJournal) -> bytes:
    """The instance of the process that asks, 16 bytes; every call counts as a start. The caller holds the folder's lock."""
    folder = journal.fact(_FOLDER)
    if folder is None:
        folder = secrets.token_hex(_FOLDER_BYTES)
        journal.set_fact(_FOLDER, folder)
    try:
        starts = int(journal.fact(_STARTS) or 0) + 1
        instance = bytes.fromhex(folder) + starts.to_bytes(16 - _FOLDER_BYTES)
    except (ValueError, OverflowError) as error:
        raise StorageError(f"the journal's {_FOLDER} or {_STARTS} was damaged: restore the silo's folder") from error
    journal.set_fact(_STARTS, str(starts))
    return instance
