"""The newest release groups that a coordinator's audit log tells of: a folder that came from a backup may have older
ones."""

from lorica_coordinator.service.release_groups import EarlierGroups
from lorica_security.audit.entry import Event, entry_from_line
from lorica_security.on_disk.log_place import LogPlace

_MARK = f'"{Event.GROUPS_STAND.value}"'


def newest_groups(audit: LogPlace) -> EarlierGroups | None:
    """None where the log tells of none. Looks no further than the newest entry; raises IntegrityError or StorageError
    naming where it is."""
    for line in audit.telling(_MARK):
        entry = entry_from_line(line.content, line.where)
        if entry.event is Event.GROUPS_STAND:
            groups = tuple(tuple(group.split(", ")) for group in entry.text("groups").split("; "))
            return EarlierGroups(number=entry.number("number"), digest=entry.text("digest"), groups=groups)
    return None
