"""What a state in PostgreSQL that was brought back from an earlier instant needs, before silos connect: what `restore`
does for a folder (restore.py), with the same code.

    since then             with the newer log       without
    somebody was revoked   is revoked again         is let in again
    somebody was let in    let in, if sealed        invited again
    invitations            void                     void
    sums were released     closed, or `--ledger`    closed
    the round under way    given up, plan stopped   given up, plan stopped
    the log                goes on where it was     goes on from then; the entry `settle` says so
    authorities            as the log has them      as the folder has them, which the log then tells

A newer log that ends before what a folder knows to have been there, or has something else there, is none of the first
column's: it is taken by word alone, plans are closed as without it, and who was revoked by what is lost is let in
again.

May be repeated, also after a kill: the newer log's entries become rows after what they say is in the records, and only
at its end does the folder forget that it knew newer rows, which is what keeps a coordinator from leading until then.
"""

from dataclasses import dataclass
from pathlib import Path

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow
from lorica_coordinator.edges.database.postgresql.log_rows import LogRows
from lorica_coordinator.edges.database.postgresql.release_rows import ReleaseRows
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.upkeep.authorities_in_log import in_entry, in_words, require_told, tells_of
from lorica_coordinator.edges.upkeep.later_log import CaughtUp, catch_up, later_log, particulars_of, unsigned_in
from lorica_coordinator.edges.upkeep.newest_in_log import Told, newest_told
from lorica_coordinator.edges.upkeep.restore import close_plans
from lorica_coordinator.edges.upkeep.taken_up import (
    go_on_from_folder,
    require_every_release,
    tell_closed,
    told_closed,
    told_in,
)
from lorica_coordinator.rounds.without_updates import without_updates
from lorica_coordinator.settings import Settings
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import FederationName
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.on_disk.reading import Reading, read_log
from lorica_security.privacy.ledger import entry_of as release_of


@dataclass(frozen=True, slots=True)
class Lost:
    """Of the log that is known to have been there: its entries `first` to `last`, which nobody gave; all that may be,
    where the newer log is of `another_history`."""

    first: int
    last: int
    another_history: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """As of `Restored`; `authorities`: as the log tells of them from here on, where it told otherwise."""

    silos: tuple[str, ...]
    closed: tuple[str, ...]
    since: CaughtUp | None
    lost: Lost | None = None
    authorities: str = ""


def settle(
    store: SqlRoundStore,
    audit: AuditLog,
    releases: ReleaseLedger,
    settings: Settings,
    federation: FederationName,
    keys: KeyStore,
    *,
    log: Path | None,
    ledger: Path | None,
    without_rest: bool = False,
    now: float,
) -> Settled:
    """The caller leads. `log` is the newer audit log in a folder, None where it is lost, `ledger` the newer ledger;
    `without_rest`: what is known to have come after `log` is lost. `now` in Unix seconds.

    Raises ConfigurationError where the state is not in PostgreSQL, `log` ends too early and nobody said that the rest
    is lost, or the folder has authorities of before; IntegrityError for a log or ledger that does not go on from the
    database's, or a ledger that is not what the log tells of; StorageError.
    """
    place, kept = audit.place, releases.kept
    if not isinstance(place, LogRows) or not isinstance(kept, ReleaseRows):
        raise ConfigurationError(
            "`coordinator settle` is for a state in PostgreSQL: `coordinator restore` settles a folder as it makes it"
        )
    for rows in (place.rows, kept.rows):
        rows.put_back = True
    go_on_from_folder(place, kept, audit, releases)
    since = lost = None
    if log is None:
        told = newest_told(place).get(Event.AUTHORITY_CHANGED)
    else:
        reading, known = _newer(log, place, audit)
        lost = _lost(place, reading, known)
        if lost is not None and not without_rest:
            raise ConfigurationError(
                f"{log} {_why(lost)}: who was revoked in between would be let in again; give a newer copy, or "
                "--without-rest where there is none"
            )
        told = _authorities_told_of(reading, str(log))
    if told is not None:
        require_told(told, keys.authorities, keys.folder, cut=log is None or lost is not None)
    if log is not None:
        since = catch_up(place.rows.transaction(), federation, reading, known)
    close_plans(
        releases,
        settings,
        since,
        ledger,
        whole=lost is None,
        released=[release_of(row.content, kept.rows.where) for row in kept.rows.all_known()],
        marked=kept.marked(),
    )
    store.void_invitations(pins=())
    state, records = without_updates(store.load(), 0.0)
    store.transition(state, records, at=now, now=0.0)
    silos = tuple(silo.silo for silo in store.silos() if silo.revoked_unix_s is None)
    if log is not None:
        place.rows.append([ChainedRow.of(entry.line(), str(log)) for entry in reading.entries[known:]], newest=None)
        place.go_on_from(reading.walk.position)
    unsigned = range(0) if since is None else since.unsigned
    told_of = told_in(place, unsigned)
    releases.close(told_closed(told_of))
    require_every_release(told_of, kept.entries(), releases.closed())
    said = particulars_of(since, ledger=ledger is not None)
    if lost is not None:
        said |= {"lost_from": str(lost.first), "lost_to": str(lost.last)}
    audit.append(Event.OPERATOR_COMMAND, command="settle", **said)
    tell_closed(audit, releases, told_of)
    authorities = ""
    newest = newest_told(place).get(Event.AUTHORITY_CHANGED)
    if newest is not None and (newest.entry.sequence in unsigned or not tells_of(newest.entry, keys.authorities)):
        audit.append(Event.AUTHORITY_CHANGED, **in_entry(keys.authorities.standings()))
        authorities = in_words(keys.authorities)
    for rows in (place.rows, kept.rows):
        rows.forget()
        for row in rows.last(1):
            rows.remember(row)
    closed = tuple(sorted(releases.closed()))
    return Settled(silos=silos, closed=closed, since=since, lost=lost, authorities=authorities)


def _lost(place: LogRows, newer: Reading, base: int) -> Lost | None:
    """What is known to have come after the end of the newer log, or in place of it; a seal of its end is nothing.
    `base`: how many entries it has in common with the rows."""
    known = [row for row in place.rows.all_known() if place.rows.at(row.sequence) != row]
    if not known:  # as after a settling that was cut off at its end
        return None
    newest, end = known[-1], len(newer.entries)
    if any(row.sequence <= end and newer.entries[row.sequence - 1].digest != row.digest for row in known):
        return Lost(min(base + 1, known[0].sequence), newest.sequence, another_history=True)
    if newest.sequence <= end:
        return None
    seals = newest.sequence == end + 1 and newer.entries[-1:] and newer.entries[-1].digest == newest.previous
    if seals and entry_from_line(newest.content, place.where).event is Event.SEALED:
        return None
    return Lost(end + 1, newest.sequence)


def _why(lost: Lost) -> str:
    if lost.another_history:
        return (
            f"is of another history: it parts from what is known to have been there, up to entry {lost.last}, after "
            f"entry {lost.first - 1} or later"
        )
    return f"ends with entry {lost.first - 1}, and entry {lost.last} is known to have been there"


def _authorities_told_of(newer: Reading, where: str) -> Told | None:
    """By the last entry that somebody signed."""
    unsigned = unsigned_in(newer)
    signed = [one for one in newer.of(Event.AUTHORITY_CHANGED) if one.sequence not in unsigned]
    return Told(signed[-1], where) if signed else None


def _newer(log: Path, place: LogRows, audit: AuditLog) -> tuple[Reading, int]:
    """As `later_log`. Rows that go on from it with what a settling entered that was cut off right then are no other
    history."""
    keys = [audit.public_key]
    newer = read_log(log, writer=audit.writer, keys=keys)
    if next(place.lines(), None) is not None:
        entries, known = read_log(place, writer=audit.writer, keys=keys).entries, len(newer.entries)
        since = entries[known:]
        if since and entries[:known] == newer.entries and all(map(_is_of_a_settling, since)):
            return newer, known
    return later_log(log, place, writer=audit.writer, key=audit.public_key)


def _is_of_a_settling(entry: Entry) -> bool:
    told = entry.event is Event.OPERATOR_COMMAND and entry.text("command") == "settle"
    return told or entry.event in (Event.SEALED, Event.CLOCK_WENT_BACK, Event.PLAN_CLOSED)
