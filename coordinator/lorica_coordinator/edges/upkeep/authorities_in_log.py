"""Whether a folder's authorities are those that the log tells of last. Of coordinators with folders of their own and
one database, one may have made an authority, or retired one, that the folder of another has not heard of: what that
one would issue is of an authority that the federation has left behind.

A folder may be one step ahead, for the entry follows the step, and a crash may come between.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lorica_coordinator.edges.keys.authorities import Authorities, Stage
from lorica_coordinator.edges.upkeep.newest_in_log import Told
from lorica_coordinator.service.issued import AuthorityStanding
from lorica_security.audit.entry import Entry, Event
from lorica_security.errors import ConfigurationError

_STAGE, _DIGEST = "is_", "certificate_"
_ORDER: Final = tuple(stage.value for stage in (Stage.SUCCESSOR, Stage.ISSUING, Stage.TRUSTED))
_ACTIVATED = {Stage.SUCCESSOR.value: Stage.ISSUING.value, Stage.ISSUING.value: Stage.TRUSTED.value}


@dataclass(frozen=True, slots=True, order=True)
class _Seen:
    """One authority; no digest where an entry of an earlier release tells of it."""

    name: str
    stage: str
    digest: str


def in_entry(standings: tuple[AuthorityStanding, ...]) -> dict[str, str]:
    """What an entry of the log says of them."""
    return {
        key: value
        for item in standings
        for key, value in ((_STAGE + _spelt(item.name), item.stage), (_DIGEST + _spelt(item.name), item.digest))
    }


def require_newest(told: Mapping[Event, Told], authorities: Authorities, keys: Path) -> None:
    """Raises ConfigurationError where the folder `keys` has neither what the log tells of last nor one step more."""
    if (newest := told.get(Event.AUTHORITY_CHANGED)) is not None:
        require_told(newest, authorities, keys)


def require_told(newest: Told, authorities: Authorities, keys: Path, *, cut: bool = False) -> None:
    """As `require_newest`. `cut`: what came after that entry is lost, so the folder may be many steps ahead."""
    last, here = _told_by(newest.entry), _here(authorities)
    if not all(one.digest for one in last):
        here = {_Seen(one.name, one.stage, "") for one in here}
    if here != last and not (_went_on(last, here) if cut else _one_step(last, here)):
        raise ConfigurationError(
            f"{keys} has other authorities than entry {newest.entry.sequence} of the log tells of ({newest.where}): "
            f"here {_said(here)}; there {_said(last)}: a coordinator with a folder of its own has changed "
            f"them since; copy all of its keys/ to {keys}, and start again"
        )


def tells_of(entry: Entry, authorities: Authorities) -> bool:
    return _told_by(entry) == _here(authorities)


def in_words(authorities: Authorities) -> str:
    return _said(_here(authorities))


def _here(authorities: Authorities) -> set[_Seen]:
    return {_Seen(_spelt(one.name), one.stage, one.digest) for one in authorities.standings()}


def _went_on(before: set[_Seen], after: set[_Seen]) -> bool:
    """Any number of steps: none of them takes an authority back, and one that left has one after it."""
    now, newest = {one.name: one for one in after}, max(map(_number, after), default=0)
    for one in before:
        if (found := now.get(one.name)) is None:
            if _number(one) >= newest:
                return False
        elif found.digest != one.digest or one.stage not in _ORDER[: _ORDER.index(found.stage) + 1]:
            return False
    return True


def _number(one: _Seen) -> int:
    """`ca` is the first, `ca_2` the one after."""
    number = one.name.rpartition("_")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 1


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
