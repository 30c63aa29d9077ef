"""What a coordinator looks at before it leads on a database that another one may have written: that audit log and
ledger go on from what its folder knows of them, and that the ledger has every sum which the log tells of.

A log or a ledger that the folder has from before they were kept in the database is taken over, once: line by line as it
is, so that the chain goes on. It stays in the folder, with a seal at its end, and is from then on what the rows have to
begin with.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import structlog

from lorica_coordinator.edges.database.postgresql.chained_rows import ChainedRow, ChainedRows
from lorica_coordinator.edges.database.postgresql.log_rows import LogRows
from lorica_coordinator.edges.database.postgresql.release_rows import ReleaseRows
from lorica_coordinator.edges.sums.kept_releases import FolderReleases, KeptReleases
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.edges.upkeep.later_log import PUT_BACK, Unsigned, is_put_back
from lorica_security.audit.entry import Entry, Event, entry_from_line
from lorica_security.audit.verification import Known, Verification
from lorica_security.errors import IntegrityError
from lorica_security.on_disk.log_file import AuditLog, LogFiles
from lorica_security.on_disk.log_place import LogPlace
from lorica_security.on_disk.reading import entries_of, read_log
from lorica_security.privacy.ledger import Entry as Release
from silo_wire.canonical import Digest

_log = structlog.get_logger(__name__)

Told = Sequence[Entry]
"""What a log tells of releases: sums, closed plans and rounds, newest first."""
_OF_RELEASES: Final = (Event.SUM_RELEASED, Event.PLAN_CLOSED, Event.ROUND_CLOSED)
_REMEDY = "put a newer one back, or `coordinator settle` says what is to be done about an older one"


def take_up(audit: AuditLog, releases: ReleaseLedger) -> None:
    """The caller leads. Raises IntegrityError naming what is behind or another one, and the remedy; StorageError."""
    log, kept = audit.place, releases.kept
    if not isinstance(log, LogRows) or not isinstance(kept, ReleaseRows):
        return
    check_newest(log, kept)  # first: rows that were emptied are not filled anew from the folder
    go_on_from_folder(log, kept, audit, releases)
    audit.head()
    entries, told = kept.entries(), told_in(log)
    require_every_release(told, entries, releases.closed())
    _require_every_closing(told, releases)
    tell_closed(audit, releases, told)
    for rows in (log.rows, kept.rows):
        for newest in rows.last(1):
            rows.make_known(newest)
    for plan in {entry.plan for entry in entries}:
        kept.rows.mark(plan)


def require_can_take_up(audit: AuditLog, releases: ReleaseLedger) -> None:
    """What `take_up` refuses, as far as that shows before anybody leads: nothing is written. Raises as it does."""
    log, kept = audit.place, releases.kept
    if not isinstance(log, LogRows) or not isinstance(kept, ReleaseRows):
        return
    check_newest(log, kept)
    if log.rows.last(1):  # else what the folder has is taken over first
        told = _told_in_whole(audit)
        require_every_release(told, kept.entries(), releases.closed())
        _require_every_closing(told, releases)


def told_in(log: LogPlace, unsigned: range = range(0)) -> Told:
    """What the log tells of releases, as whoever keeps it answers. `unsigned`: entries of which it does not tell yet
    that nobody signed them."""
    lines = log.telling(*(f'"{word}"' for word in (*(event.value for event in _OF_RELEASES), *PUT_BACK)))
    return _signed_of((entry_from_line(line.content, line.where) for line in lines), unsigned)


def _told_in_whole(audit: AuditLog) -> Told:
    """The same, from a walk over the whole chain up to its signed end: an entry that is missing in between, or that a
    database does not show to who asks for it, closes no plan, and tells of no sum. One seal is enough, that of the end:
    each entry names the one before it. Raises IntegrityError."""
    head, walk = audit.head(), Verification()
    try:
        told = [one for one in entries_of(audit.place, walk) if one.event in _OF_RELEASES or is_put_back(one)]
        walk.check_known([Known(head=head, by="its last seal")], audit.place.where)
    except IntegrityError as error:
        raise IntegrityError(f"{error}; put back a database of before, and ask who could write it") from error
    return _signed_of((one for one in reversed(told) if one.sequence <= head.sequence), range(0))


def _signed_of(newest_first: Iterable[Entry], at_end: range) -> Told:
    """Of sums and rounds what somebody signed; a plan that anybody closed is closed."""
    unsigned, told = Unsigned([at_end]), []
    for entry in newest_first:
        unsigned.take(entry)
        if entry.event is Event.PLAN_CLOSED or (entry.event in _OF_RELEASES and entry.sequence not in unsigned):
            told.append(entry)
    return told


def check_newest(log: LogPlace, kept: KeptReleases | None) -> None:
    """Raises IntegrityError where rows are behind what is known of them outside, or others; of files nothing is."""
    if isinstance(log, LogRows) and isinstance(kept, ReleaseRows):
        for rows in (log.rows, kept.rows):
            rows.check_newest()


def go_on_from_folder(log: LogRows, kept: ReleaseRows, audit: AuditLog, releases: ReleaseLedger) -> None:
    """Take over what the folder has, or see that the rows begin with it."""
    _go_on_from_log(log, audit)
    _go_on_from_ledger(kept, releases)


def require_every_release(told_of: Told, entries: Sequence[Release], closed: frozenset[Digest]) -> None:
    """Raises IntegrityError where the log tells of a sum that is none of the ledger's `entries`, of a plan that is not
    one of `closed`. `told_of` releases; a sum that nobody signed was counted when it was settled, and vouches for none.

    A sum may be told of twice, and under two numbers: an answer was lost, or somebody was quicker. It is one by its
    subject, where that stands before an entry of the ledger which the log has the digest of. One whose round was not
    closed may be missing: a kill between log and ledger left it, and nothing came of it. Then the next one has its
    number, or will have it.
    """
    told = [entry for entry in told_of if entry.event is Event.SUM_RELEASED]
    digests = {entry.text("ledger_digest") for entry in told}
    whole = max((entry.number("ledger_entry") for entry in told if _has(entries, entry)), default=0)
    made = {(entry.plan, entry.subject) for entry in entries[:whole] if entry.subject}
    kept = {_attempt(entry) for entry in told if _has(entries, entry)}
    for entry in reversed(told):
        number = entry.number("ledger_entry")
        if _has(entries, entry) or entry.text("plan") in closed:
            continue
        subject = entry.text("ledger_subject")
        if (entry.text("plan"), subject) in made or (not subject and _attempt(entry) in kept):
            continue
        taken = 0 < number <= len(entries) and entries[number - 1].digest in digests
        cut_off = taken or number == len(entries) + 1
        if cut_off and not _was_closed(told_of, entry):
            continue
        raise IntegrityError(
            f"the ledger of releases has not the entry {number} that the audit log tells of (entry {entry.sequence}, "
            f"plan {entry.text('plan')[:16]}, round {entry.number('round')}): epsilon that was spent would be "
            f"forgotten; {_REMEDY}"
        )


def told_closed(told: Told) -> frozenset[Digest]:
    """The plans that the log tells of as closed."""
    return frozenset(Digest(entry.text("plan")) for entry in told if entry.event is Event.PLAN_CLOSED)


def tell_closed(audit: AuditLog, releases: ReleaseLedger, told: Told) -> None:
    """Enter closed plans that the log, which has `told` this, does not tell of: rows of them are in no chain
    themselves."""
    for plan in sorted(releases.closed() - told_closed(told)):
        audit.append(Event.PLAN_CLOSED, plan=plan)


def tells_of_sum(audit: AuditLog, release: Release) -> bool:
    """One of an earlier release tells no digest. Raises IntegrityError where the log is not whole: any entry could
    have been made to tell of it."""
    return any(
        entry.event is Event.SUM_RELEASED
        and (entry.number("ledger_entry"), entry.text("plan")) == (release.sequence, release.plan)
        and entry.text("ledger_digest") in ("", release.digest)
        for entry in _told_in_whole(audit)
    )


def _require_every_closing(told: Told, releases: ReleaseLedger) -> None:
    if lost := sorted(told_closed(told) - releases.closed()):
        raise IntegrityError(
            f"plan {lost[0][:16]} is not closed any more, though the audit log tells that it was: it would release "
            f"more than it promises; {_REMEDY}"
        )


def _has(entries: Sequence[Release], told: Entry) -> bool:
    number = told.number("ledger_entry")
    return 0 < number <= len(entries) and entries[number - 1].digest == told.text("ledger_digest")


def _attempt(told: Entry) -> tuple[str, int, int]:
    return told.text("plan"), told.number("round"), told.number("attempt")


def _was_closed(told: Told, released: Entry) -> bool:
    """Whether the round went on to its end after `released` was told of."""
    return any(
        entry.event is Event.ROUND_CLOSED
        and entry.sequence > released.sequence
        and _attempt(entry) == _attempt(released)
        for entry in told
    )


def _go_on_from_log(log: LogRows, audit: AuditLog) -> None:
    before = LogFiles(log.folder)
    newest = next(before.telling(""), None)
    if newest is None:
        return
    of = f"the audit log in {log.folder}"
    if log.rows.last(1):
        _require_row(log.rows, ChainedRow.of(newest.content, newest.where), of=of)
        return
    read_log(before, writer=audit.writer, keys=[audit.public_key])
    audit.in_place(before).append(Event.SEALED)  # where its last entries have none: rows end with a seal
    reading = read_log(before, writer=audit.writer, keys=[audit.public_key])
    _take_over(log.rows, [ChainedRow.of(entry.line(), before.where) for entry in reading.entries], of=of)


def _go_on_from_ledger(kept: ReleaseRows, releases: ReleaseLedger) -> None:
    before = FolderReleases(releases.folder)
    rows = [ChainedRow.of(entry.line(), str(before.path)) for entry in before.entries()]
    of = f"the ledger of releases in {before.path}"
    if rows and kept.rows.last(1):
        _require_row(kept.rows, rows[-1], of=of)
    elif rows:
        _take_over(kept.rows, rows, of=of)
    kept.close(before.closed())
    root = before.root()
    if root is None:
        return
    if kept.root() is None:
        kept.keep_root(root)
    if kept.root() != root:
        raise IntegrityError(
            f"{before.root_path} is another root than {kept.rows.where} has noise from: a sum would have two noises, "
            "and together they hide less; move it away where the database is right"
        )


def _take_over(rows: ChainedRows, before: Sequence[ChainedRow], *, of: str) -> None:
    rows.append(before, newest=before[-1])
    _log.info("taken over into the database", what=of, entries=len(before))


def _require_row(rows: ChainedRows, newest: ChainedRow, *, of: str) -> None:
    """Raises IntegrityError where the rows begin otherwise than what ends with `newest`, which names all before it."""
    if rows.at(newest.sequence) != newest:
        raise IntegrityError(
            f"{of} ends with entry {newest.sequence}, and {rows.where} does not go on from it: it is of another "
            "coordinator or another time; move it away where the rows are right, else name another database in "
            "[storage] database"
        )
