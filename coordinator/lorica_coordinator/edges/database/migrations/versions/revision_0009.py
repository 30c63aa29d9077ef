"""The journal of a masked attempt as rows, one for each event, in place of one text that was written anew each time.

The machine's state of version 5 has none of it, but how many events there are. On the way back they are put into the
text again.
"""

import json
from base64 import b64decode, b64encode
from typing import Any

import sqlalchemy as sa
from alembic import op

from lorica_security.errors import StorageError

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "masked_events",
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("event", sa.LargeBinary, nullable=False),
    )
    op.add_column("machine", sa.Column("events", sa.Integer, nullable=False, server_default="0"))
    connection = op.get_bind()
    for (text,) in connection.execute(sa.text("SELECT state FROM machine WHERE version = 4")).all():
        state = json.loads(text)
        if (attempt := _attempt_of(state)) is not None:
            events = [b64decode(event) for event in attempt["journal"]]
            attempt["journal"] = []
            for position, event in enumerate(events, start=1):
                connection.execute(
                    sa.text("INSERT INTO masked_events (position, event) VALUES (:position, :event)"),
                    {"position": position, "event": event},
                )
            connection.execute(
                sa.text("UPDATE machine SET state = :state, events = :events"),
                {"state": json.dumps(state), "events": len(events)},
            )
    op.execute("UPDATE machine SET version = 5 WHERE version = 4")
    op.execute("UPDATE schema SET version = 9")


def downgrade() -> None:
    connection = op.get_bind()
    events = connection.execute(sa.text("SELECT event FROM masked_events ORDER BY position")).scalars().all()
    for text, count in connection.execute(sa.text("SELECT state, events FROM machine WHERE version = 5")).all():
        state = json.loads(text)
        if count != len(events):
            raise StorageError(
                f"the state has {len(events)} events of the masked attempt under way, not {count}: restore it from "
                "backup"
            )
        if (attempt := _attempt_of(state)) is not None:
            attempt["journal"] = [b64encode(event).decode() for event in events]
            connection.execute(sa.text("UPDATE machine SET state = :state"), {"state": json.dumps(state)})
    op.execute("UPDATE machine SET version = 4 WHERE version = 5")
    op.drop_column("machine", "events")
    op.drop_table("masked_events")
    op.execute("UPDATE schema SET version = 8")


def _attempt_of(state: dict[str, Any]) -> dict[str, Any] | None:
    """Of a state while it masks, or of one whose sum is unmasked."""
    masked = state.get("masked")
    attempt: dict[str, Any] | None = state.get("secure") if masked is None else masked["attempt"]
    return attempt
