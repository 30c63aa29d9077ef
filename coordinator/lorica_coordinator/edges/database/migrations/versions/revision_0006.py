"""The chain of release groups: which silos enter a masked sum together or not at all.

A new table: every row that was there stays as it is. A federation that comes from an earlier release has no groups, and
proposes its first before the next masked round.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.create_table(
        "release_groups",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("stands", sa.Boolean, nullable=False),
        sa.Column("colluders", sa.Integer, nullable=False),
        sa.Column("signed", sa.LargeBinary, nullable=False),
    )
    op.execute("UPDATE schema SET version = 6")


def downgrade() -> None:
    op.drop_table("release_groups")
    op.execute("UPDATE schema SET version = 5")
