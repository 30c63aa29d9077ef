"""What a state in PostgreSQL needs: the sealed part of a masked attempt, who leads, and counts of 64 bits.

In SQLite the new columns and the new table stay empty. A sealed attempt does not go back: a release that knows no seals
could not read it.
"""

import sqlalchemy as sa
from alembic import op

from lorica_security.errors import StorageError

revision = "0011"
down_revision = "0010"

_COUNTS = {
    "rounds": ("saturated", "coordinates"),
    "updates": ("examples", "optimizer_steps"),
    "evaluations": ("examples", "exact_matches", "executed", "execution_matches"),
}


def upgrade() -> None:
    op.add_column("machine", sa.Column("sealed", sa.LargeBinary))
    op.add_column("machine", sa.Column("asked", sa.Boolean))
    op.add_column("machine", sa.Column("saved_as", sa.String(32)))
    op.create_table(
        "leadership",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("federation", sa.String(63), nullable=False),
        sa.Column("identity", sa.String(64), nullable=False),
        sa.Column("term", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.String(255), nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        for table, names in _COUNTS.items():
            for name in names:
                op.alter_column(table, name, type_=sa.BigInteger())
    op.execute("UPDATE schema SET version = 11")


def downgrade() -> None:
    if op.get_bind().execute(sa.text("SELECT count(*) FROM machine WHERE sealed IS NOT NULL")).scalar():
        raise StorageError(
            "a masked attempt is under way, sealed as the release before cannot read it: stop the plan with "
            "`coordinator plan stop` first"
        )
    if op.get_bind().dialect.name == "postgresql":
        raise StorageError("releases before tables of revision 0011 know no PostgreSQL: this state has no way back")
    op.drop_table("leadership")
    op.drop_column("machine", "saved_as")
    op.drop_column("machine", "asked")
    op.drop_column("machine", "sealed")
    op.execute("UPDATE schema SET version = 10")
