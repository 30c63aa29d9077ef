"""A folder for keys that several coordinators see, told from the empty one that lies there while it is not mounted.

The first leader writes a random text into a file of that folder, and the database has the same text. A folder without
it is another one: what is written there nobody finds again, and a key that is missed there may well exist. Who can
write the folder chooses what the file holds, and who can write the database what is expected: either can stop a start,
and neither has keys written elsewhere unless both agree.
"""

import re
import secrets
from pathlib import Path
from typing import Final

from lorica_security.errors import StorageError
from lorica_security.host import files

MARK: Final = "vault.id"
MARK_BYTES: Final = 16
_TEXT: Final = re.compile(rb"([0-9a-f]{32})\n?")
_MOUNT: Final = "mount it on every machine that a coordinator runs on"


def marked(folder: Path, known: str) -> str:
    """The text that `folder` has: 2 * MARK_BYTES hexadecimal digits. A new one is durable there when this returns.

    `known`: what the database has; "" where it knows no folder yet. Raises StorageError for any other folder.
    """
    if not folder.is_dir():
        raise StorageError(f"{folder} of [storage] attempt_keys is not there: make it (mode 0700), or {_MOUNT}")
    mark = folder / MARK
    found = _read(mark)
    if found is None and not known:
        found = secrets.token_hex(MARK_BYTES)
        files.write_private(mark, f"{found}\n".encode())
    elif known and found != known:
        has = "is not there" if found is None else f"holds {found}"
        raise StorageError(
            f"{mark} {has}, and the database knows the folder of [storage] attempt_keys by {known[:64]!r}: {_MOUNT}; "
            f"where it is this folder all the same, and former keys are lost or lie here, write that text into {mark}"
        )
    assert found is not None
    return found


def require_marked(folder: Path) -> None:
    """Raises StorageError where neither `folder` nor one above it is a place that a leader has marked."""
    if not any((place / MARK).is_file() for place in (folder, *folder.parents)):
        raise StorageError(
            f"{folder} of [storage] attempt_keys is not there, or is not the folder that keys are in ({MARK} is "
            f"missing): {_MOUNT}"
        )


def _read(mark: Path) -> str | None:
    try:
        with mark.open("rb") as file:
            raw = file.read(3 * MARK_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"{mark} cannot be read: {error.strerror or error}") from error
    text = _TEXT.fullmatch(raw)
    if text is None:
        raise StorageError(f"{mark} holds {raw[:40]!r}, not {2 * MARK_BYTES} hexadecimal digits: {_MOUNT}")
    return text[1].decode()
