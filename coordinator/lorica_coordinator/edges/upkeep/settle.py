"""What a state in PostgreSQL that was brought back from an earlier instant needs, before silos connect: what `restore`
does for a folder (restore.py), with the same code.

    since then             with the newer log       without
    somebody was revoked   is revoked again         is let in again
    somebody was let in    let in, if sealed        invited again
    invitations            void                     void
    sums were released     closed, or `--ledger`    closed
    the round under way    given up, plan stopped   given up, plan stopped
    the log                goes on where it was     goes on from then; the entry `settle` says so

A newer log that ends before what a folder knows to have been there is none of the first column's: it is taken by word
alone, plans are closed as without it, and who was revoked since its end is let in again.

May be repeated, also after a kill: the newer log's entries become rows after what they say is in the records, and only
at its end does the folder forget that it knew newer rows, which is what keeps a coordinator from leading until then.
"""

from dataclasses import dataclass
from pathlib import Path

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow
from lorica_coordinator.edges.database.postgresql.log_rows import LogRows
from lorica_coordinator.edges.database.postgresql.release_rows import ReleaseRows
from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.upkeep.later_log import CaughtUp, catch_up, later_log, particulars_of
from lorica_coordinator.edges.upkeep.restore import close_plans
from lorica_coordinator.edges.upkeep.taken_up import (
    go_on_from_folder,
    require_every_release,
    tell_closed,
    told_closed,
)
from lorica_coordinator.rounds.without_updates import without_updates
from lorica_coordinator.settings import Settings
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import FederationName
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.on_disk.reading import Reading, read_log
from lorica_security.privacy.ledger import Entry as Release
from lorica_security.privacy.ledger import entry_of as release_of


@dataclass(frozen=True, slots=True)
class Settled:
    """As of `Restored`; `lost` are the numbers of the first and the last entry of the log that is known to have been
    there and that nobody gave."""

    silos: tuple[str, ...]
    closed: tuple[str, ...]
    since: CaughtUp | None
    lost: tuple[int, int] | None = None


def settle(
    store: SqlRoundStore,
    audit: AuditLog,
    releases: ReleaseLedger,
    settings: Settings,
    federation: FederationName,
    *,
    log: Path | None,
    ledger: Path | None,
    without_rest: bool = False,
    now: float,
) -> Settled:
    """The caller leads. `log` is the newer audit log in a folder, None where it is lost, `ledger` the newer ledger;
    `without_rest`: what is known to have come after `log` is lost. `now` in Unix seconds.

    Raises ConfigurationError where the state is not in PostgreSQL, or `log` ends too early and nobody said that the
    rest is lost, IntegrityError for a log or ledger that does not go on from the database's, StorageError.
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
    if log is not None:
        reading, known = _newer(log, place, audit)
        lost = _lost(place, reading)
        if lost is not None and not without_rest:
            raise ConfigurationError(
                f"{log} ends with entry {lost[0] - 1}, and entry {lost[1]} is known to have been there: who was "
                "revoked in between would be let in again; give a newer copy, or --without-rest where there is none"
            )
        since = catch_up(place.rows.transaction(), federation, reading, known)
    closed = close_plans(releases, settings, since, ledger, whole=lost is None, newest=_newest_release(kept))
    store.void_invitations(pins=())
    state, records = without_updates(store.load(), 0.0)
    store.transition(state, records, at=now, now=0.0)
    silos = tuple(silo.silo for silo in store.silos() if silo.revoked_unix_s is None)
    if log is not None:
        place.rows.append([ChainedRow.of(entry.line(), str(log)) for entry in reading.entries[known:]], newest=None)
        place.go_on_from(reading.walk.position)
    releases.close(told_closed(place))
    require_every_release(place, releases)
    audit.append(Event.OPERATOR_COMMAND, command="settle", **particulars_of(since, ledger=ledger is not None))
    tell_closed(audit, releases)
    for rows in (place.rows, kept.rows):
        rows.forget()
        for newest in rows.last(1):
            rows.remember(newest)
    return Settled(silos=silos, closed=closed, since=since, lost=lost)


def _lost(place: LogRows, newer: Reading) -> tuple[int, int] | None:
    """What is known to have come after the end of the newer log, or in place of it; a seal of its end is nothing."""
    known = place.rows.newest_known()
    if known is None:
        return None
    end = len(newer.entries)
    if known.sequence <= end:
        return None if newer.entries[known.sequence - 1].digest == known.digest else (known.sequence, known.sequence)
    seals = known.sequence == end + 1 and newer.entries[-1:] and newer.entries[-1].digest == known.previous
    if seals and entry_from_line(known.content, place.where).event is Event.SEALED:
        return None
    return end + 1, known.sequence


def _newest_release(kept: ReleaseRows) -> Release | None:
    newest = kept.rows.newest_known()
    return None if newest is None else release_of(newest.content, kept.rows.where)


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
