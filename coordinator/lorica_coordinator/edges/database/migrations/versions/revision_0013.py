"""Rows, where the state is in PostgreSQL: the audit log, the ledger of releases, the plans that are closed and the root
that noise is made from. In SQLite the tables stay empty."""

import sqlalchemy as sa
from alembic import op

from lorica_security.errors import StorageError

revision = "0013"
down_revision = "0012"

_CHAINED = ("audit_log", "release_ledger")
_ADDED_TO = (*_CHAINED, "closed_plans", "release_root")
_REFUSE = """
CREATE FUNCTION lorica_added_to_alone() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'rows of % are never changed or deleted', TG_TABLE_NAME; END $$
"""


def upgrade() -> None:
    for name in _CHAINED:
        op.create_table(
            name,
            sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
            sa.Column("previous", sa.String(64), nullable=False, unique=True),
            sa.Column("line", sa.Text, nullable=False),
        )
    op.create_table("closed_plans", sa.Column("plan", sa.String(64), primary_key=True))
    op.create_table(
        "release_root",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(sa.text(_REFUSE))
        for name in _ADDED_TO:
            op.execute(
                f"CREATE TRIGGER {name}_is_added_to BEFORE UPDATE OR DELETE OR TRUNCATE ON {name} "
                "FOR EACH STATEMENT EXECUTE FUNCTION lorica_added_to_alone()"
            )
    op.execute("UPDATE schema SET version = 13")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        raise StorageError(
            "the release before looks for the audit log and the ledger of releases in the folder, and would forget "
            "what is in these tables: this state has no way back"
        )
    for name in _ADDED_TO:
        op.drop_table(name)
    op.execute("UPDATE schema SET version = 12")
