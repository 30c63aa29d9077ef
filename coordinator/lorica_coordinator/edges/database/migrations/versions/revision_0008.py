"""What is left of a deadline, in place of the date when it ends: the machine's state of version 4.

How long the coordinator was down for the upgrade is held against nobody. The release before gave a phase its deadline
anew when it started, whatever it found, so a phase has all of it once more, and of what an upgrade found on the way
back nothing has to be written.
"""

import json

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"

_DEADLINES = {
    "gathering": "gathering_deadline_s",
    "collecting": "training_deadline_s",
    "masking": "masking_deadline_s",
    "evaluating": "evaluation_deadline_s",
}


def upgrade() -> None:
    connection = op.get_bind()
    for phase, text in connection.execute(sa.text("SELECT phase, state FROM machine WHERE version = 3")).all():
        state = json.loads(text)
        if state.get("deadline") is not None:
            state["deadline"] = state["course"]["terms"][_DEADLINES[phase]]
            connection.execute(sa.text("UPDATE machine SET state = :state"), {"state": json.dumps(state)})
    op.execute("UPDATE machine SET version = 4 WHERE version = 3")
    op.execute("UPDATE schema SET version = 8")


def downgrade() -> None:
    op.execute("UPDATE machine SET version = 3 WHERE version = 4")
    op.execute("UPDATE schema SET version = 7")
