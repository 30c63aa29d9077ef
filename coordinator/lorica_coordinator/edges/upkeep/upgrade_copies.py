"""Names of the copies of the database that `coordinator upgrade` makes: they say which revision it had, and when that
was.

The time stands in the name, since a copy that is being overwritten, to be deleted, is no younger for it.
"""

import re
from datetime import UTC, datetime
from pathlib import Path

_NAME = re.compile(r".+\.[0-9]{4}-([0-9]{8}T[0-9]{6}Z)")
_TIME = "%Y%m%dT%H%M%SZ"


def copy_of(database: Path, revision: str, now: datetime) -> Path:
    """Beside the database."""
    return database.with_name(f"{database.name}.{revision}-{now.astimezone(UTC).strftime(_TIME)}")


def copied_at(path: Path) -> float | None:
    """When the copy was made, in Unix seconds; None for what is no copy."""
    if (match := _NAME.fullmatch(path.name)) is None:
        return None
    try:
        return datetime.strptime(match[1], _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
