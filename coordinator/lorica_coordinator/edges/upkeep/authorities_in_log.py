"""Whether a folder's authorities are those that the log tells of last. Of coordinators with folders of their own and
one database, one may have made an authority, or retired one, that the folder of another has not heard of: what that
one would issue is of an authority that the federation has left behind.

A folder may be one step ahead, for the entry follows the step, and a crash may come between.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lorica_coordinator.edges.keys.authorities import Authorities, Stage
from lorica_coordinator.edges.upkeep.newest_in_log import Told
from lorica_coordinator.service.issued import AuthorityStanding
from lorica_security.audit.entry import Entry, Event
from lorica_security.errors import ConfigurationError

_STAGE, _DIGEST = "is_", "certificate_"
_ACTIVATED = {Stage.SUCCESSOR.value: Stage.ISSUING.value, Stage.ISSUING.value: Stage.TRUSTED.value}


@dataclass(frozen=True, slots=True, order=True)
class _Seen:
    """One authority; no digest where an entry of an earlier release tells of it."""

    name: str
    stage: str
    digest: str


def told(standings: tuple[AuthorityStanding, ...]) -> dict[str, str]:
    """What an entry of the log says of them."""
    return {
        key: value
        for item in standings
        for key, value in ((_STAGE + _spelt(item.name), item.stage), (_DIGEST + _spelt(item.name), item.digest))
    }


def require_newest(told: Mapping[Event, Told], authorities: Authorities, keys: Path) -> None:
    """Raises ConfigurationError where the folder `keys` has neither what the log tells of last nor one step more."""
    if (newest := told.get(Event.AUTHORITY_CHANGED)) is None:
        return
    last = _told_by(newest.entry)
    here = {_Seen(_spelt(one.name), one.stage, one.digest) for one in authorities.standings()}
    if not all(one.digest for one in last):
        here = {_Seen(one.name, one.stage, "") for one in here}
    if here != last and not _one_step(last, here):
        raise ConfigurationError(
            f"{keys} has other authorities than entry {newest.entry.sequence} of the log tells of ({newest.where}): "
            f"here {_said(here)}; there {_said(last)}: a coordinator with a folder of its own has changed "
            f"them since; copy all of its keys/ to {keys}, and start again"
        )


def _one_step(before: set[_Seen], after: set[_Seen]) -> bool:
    """A successor joined, it issues now, or one that was merely trusted was retired."""
    joined, left = after - before, before - after
    if not left:
        return [one.stage for one in joined] == [Stage.SUCCESSOR.value]
    if not joined:
        return [one.stage for one in left] == [Stage.TRUSTED.value]
    waited = any(one.stage == Stage.SUCCESSOR.value for one in before)
    return waited and after == {_Seen(one.name, _ACTIVATED.get(one.stage, one.stage), one.digest) for one in before}


def _told_by(entry: Entry) -> set[_Seen]:
    names = [key.removeprefix(_STAGE) for key in entry.details if key.startswith(_STAGE)]
    return {_Seen(name, entry.text(_STAGE + name), entry.text(_DIGEST + name)) for name in names}


def _said(seen: set[_Seen]) -> str:
    words = [f"{one.name.replace('_', '-')} ({one.digest[:16] or 'unknown'}) is {one.stage}" for one in sorted(seen)]
    return ", ".join(words)


def _spelt(name: str) -> str:
    return name.replace("-", "_")
