"""Of each silo the newest keys for masks that it advertised: told to it, they show a silo that its memory went back.

A new column, empty: of a silo that has masked before the upgrade it is known from its next masked round on.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("silos", sa.Column("announced", sa.LargeBinary(32)))
    op.execute("UPDATE schema SET version = 7")


def downgrade() -> None:
    op.drop_column("silos", "announced")
    op.execute("UPDATE schema SET version = 6")
