"""The newest release groups, and the newest authorities, that a coordinator's audit log tells of: a folder that came
from a backup, or one beside which another coordinator led, may have older ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lorica_coordinator.edges.upkeep.later_log import PUT_BACK, Unsigned
from lorica_coordinator.service.release_groups import EarlierGroups
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.on_disk.log_place import LogPlace

_EVENTS: Final = (Event.GROUPS_STAND, Event.AUTHORITY_CHANGED)


@dataclass(frozen=True, slots=True)
class Told:
    """An entry of the log, and where it stands."""

    entry: Entry
    where: str


def newest_told(audit: LogPlace) -> Mapping[Event, Told]:
    """Of groups and of authorities, where the log tells of any: in one look from its newest entry on, which ends with
    the later found of the two. Not of groups that nobody had signed when a coordinator was put back by a copy with
    them: silos would be waited for that cannot have them. Raises IntegrityError or StorageError naming where it is."""
    found: dict[Event, Told] = {}
    unsigned = Unsigned()
    for line in audit.telling(*(f'"{word}"' for word in (*(event.value for event in _EVENTS), *PUT_BACK))):
        entry = entry_from_line(line.content, line.where)
        unsigned.take(entry)
        if entry.event is Event.GROUPS_STAND and entry.sequence in unsigned:
            continue
        if entry.event in _EVENTS:
            found.setdefault(entry.event, Told(entry, line.where))
        if len(found) == len(_EVENTS):
            break
    return found


def newest_groups(told: Mapping[Event, Told]) -> EarlierGroups | None:
    """None where the log tells of none."""
    if (last := told.get(Event.GROUPS_STAND)) is None:
        return None
    groups = tuple(tuple(group.split(", ")) for group in last.entry.text("groups").split("; "))
    return EarlierGroups(number=last.entry.number("number"), digest=last.entry.text("digest"), groups=groups)
