"""Which release each silo's agent runs, as it said when it last connected.

A NOT NULL column with a default keeps every row as it is. Version 5 in `schema` is what a release without revisions
looks at, and refuses.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("silos", sa.Column("agent_version", sa.String(64), nullable=False, server_default=""))
    op.add_column("silos", sa.Column("agent_wire", sa.String(16), nullable=False, server_default=""))
    op.execute("UPDATE schema SET version = 5")


def downgrade() -> None:
    op.drop_column("silos", "agent_wire")
    op.drop_column("silos", "agent_version")
    op.execute("UPDATE schema SET version = 4")
