"""Which revision a state's tables have, and whether this release works with it. Alembic is not needed to tell."""

from sqlalchemy import Connection, inspect, select

from lorica_coordinator.edges.database.round_tables import FIRST_REVISION, TABLES_REVISION, revisions, schema
from lorica_security.errors import StorageError


def revision_of(connection: Connection) -> str | None:
    """As four digits; of a database from before there were revisions, that of its `schema`. None: it has no tables."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        return None
    for table in (revisions, schema):
        if table.name in tables and (found := connection.execute(select(*table.columns)).scalar()) is not None:
            return f"{found:04}" if isinstance(found, int) else str(found)
    return ""


def require_current(revision: str, where: str) -> None:
    """Raises StorageError with the remedy for tables of another release."""
    if revision == TABLES_REVISION:
        return
    known = revision.isdecimal() and revision >= FIRST_REVISION
    if known and revision < TABLES_REVISION:
        remedy = "run `coordinator upgrade`, which copies the database first"
    elif known:
        remedy = "install the release that wrote it, or a newer one"
    else:
        remedy = "no release that can be upgraded from wrote it; run the one that did, or restore a backup"
    raise StorageError(
        f"{where} has tables of revision {revision or 'none'}, this release works with {TABLES_REVISION}: {remedy}"
    )
