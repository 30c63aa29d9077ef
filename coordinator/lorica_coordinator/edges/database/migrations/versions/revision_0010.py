"""Of how many silos the means of a round are, and how often details of a plan were deleted.

Both are for who looks back at rounds: a mean over three silos may be shown also when their scores are deleted, and what
was deleted is shown from no memory.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("rounds", sa.Column("scored", sa.Integer))
    op.add_column("plans", sa.Column("deletions", sa.Integer, nullable=False, server_default="0"))
    # As far as scores are there; of a round whose scores were deleted nobody knows.
    op.execute(
        "UPDATE rounds SET scored = (SELECT nullif(count(*), 0) FROM evaluations "
        "WHERE evaluations.plan = rounds.plan AND evaluations.round = rounds.round) "
        "WHERE macro_exact_match IS NOT NULL"
    )
    op.execute("UPDATE schema SET version = 10")


def downgrade() -> None:
    op.drop_column("plans", "deletions")
    op.drop_column("rounds", "scored")
    op.execute("UPDATE schema SET version = 9")
