"""The newest release groups that a coordinator's audit log tells of: a folder that came from a backup may have older
ones."""

from pathlib import Path

from lorica_coordinator.service.release_groups import EarlierGroups
from lorica_security.audit.entry import Event, entry_from_line
from lorica_security.errors import StorageError
from lorica_security.on_disk.log_file import segments

_MARK = f'"{Event.GROUPS_STAND.value}"'.encode()


def newest_groups(audit: Path) -> EarlierGroups | None:
    """None where the log tells of none. Looks no further than the newest entry; raises IntegrityError or StorageError
    naming a file."""
    for path in reversed(segments(audit)):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error
        for line in reversed(content.splitlines(keepends=True)):
            if _MARK not in line or not line.endswith(b"\n"):
                continue
            entry = entry_from_line(line, str(path))
            if entry.event is Event.GROUPS_STAND:
                groups = tuple(tuple(group.split(", ")) for group in entry.text("groups").split("; "))
                return EarlierGroups(number=entry.number("number"), digest=entry.text("digest"), groups=groups)
    return None
