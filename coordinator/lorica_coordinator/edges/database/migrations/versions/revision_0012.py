"""For several coordinators that see one database: a token for each term, and which key an attempt is sealed under.

A masked attempt that is under way in PostgreSQL is lost, once: its key has no name that the row could give.
"""

import sqlalchemy as sa
from alembic import op

from lorica_security.errors import StorageError

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.add_column("machine", sa.Column("sealed_under", sa.String(64)))
    op.add_column("leadership", sa.Column("token", sa.String(32), nullable=False, server_default=""))
    op.execute("UPDATE schema SET version = 12")


def downgrade() -> None:
    if op.get_bind().execute(sa.text("SELECT count(*) FROM machine WHERE sealed IS NOT NULL")).scalar():
        raise StorageError(
            "a masked attempt is under way, sealed as the release before cannot read it: stop the plan with "
            "`coordinator plan stop` first"
        )
    op.drop_column("leadership", "token")
    op.drop_column("machine", "sealed_under")
    op.execute("UPDATE schema SET version = 11")
