"""Which process of which agent attends: 8 bytes that stand for the silo's folder, then the number of this start in it.

The folder's lock lets one process at a time start there, so a higher number is a restart of a process that has ended,
even where the coordinator has not heard its end: after a power cut, or behind a network that broke. It gives the
restarted agent its seat at once. A copy of the folder is another one (its inode differs), so a second agent that runs
from it is still told that it is one.
"""

import hashlib
import secrets
from pathlib import Path

from lorica_security.errors import StorageError
from silo_agent.edges.disk.round_journal import RoundJournal

_FOLDER_BYTES = 8
_NAME, _STARTS = "instance_name", "instance_starts"


def next_instance(journal: RoundJournal, folder: Path) -> bytes:
    """The instance of the process that asks, 16 bytes; every call counts as a start. The caller holds the folder's
    lock.

    Raises StorageError.
    """
    name = journal.fact(_NAME)
    if name is None:
        name = secrets.token_hex(16)
        journal.set_fact(_NAME, name)
    try:
        place = hashlib.sha256(f"{name} {folder.stat().st_ino}".encode()).digest()[:_FOLDER_BYTES]
        starts = int(journal.fact(_STARTS) or 0) + 1
        instance = place + starts.to_bytes(16 - _FOLDER_BYTES)
    except OSError as error:
        raise StorageError(f"{folder} cannot be looked at: {error.strerror or error}") from error
    except (ValueError, OverflowError) as error:
        raise StorageError(
            f"{folder}: {_STARTS} in the journal was damaged: restore the folder from a backup"
        ) from error
    journal.set_fact(_STARTS, str(starts))
    return instance
