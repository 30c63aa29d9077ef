"""The journal of the masked attempt that is under way: one row for each event, written once and never changed.

A silo's message may hold a sealed box for each other silo. Whoever wrote the whole journal at every message would write
what grows with the cube of the number of silos; what is added here grows with the square. With the attempt all rows go.
"""

from collections.abc import Callable

from sqlalchemy import Connection, delete, insert, select

from lorica_coordinator.edges.database.round_tables import masked_events
from lorica_security.errors import StorageError

Wrap = Callable[[int, bytes], bytes]
"""What an event at this position is on the disk, or what is there in clear."""


def in_clear(position: int, event: bytes) -> bytes:
    return event


def write_events(
    connection: Connection, before: tuple[bytes, ...] | None, events: tuple[bytes, ...], seal: Wrap = in_clear
) -> bool:
    """Bring the rows from `before` (None: it is not known what they are) to `events`; whether any was deleted."""
    kept, deleted = 0, False
    if before is not None and events[: len(before)] == before:
        kept = len(before)
    else:
        deleted = connection.execute(delete(masked_events)).rowcount > 0
    added = [{"position": at, "event": seal(at, event)} for at, event in enumerate(events[kept:], start=kept + 1)]
    if added:
        connection.execute(insert(masked_events), added)
    return deleted


def read_events(connection: Connection, count: int, where: str, opened: Wrap = in_clear) -> tuple[bytes, ...]:
    """In the order of the journal; raises StorageError naming `where` unless they are events 1 to `count`."""
    rows = connection.execute(select(masked_events).order_by(masked_events.c.position)).all()
    if [row.position for row in rows] != list(range(1, count + 1)):
        raise StorageError(
            f"{where} has {len(rows)} events of the masked attempt under way, not events 1 to {count}: "
            "restore it from backup"
        )
    return tuple(opened(row.position, bytes(row.event)) for row in rows)
