"""The tables of the first release that had revisions: what a database of version 4 holds already.

They are written down here as they were then, whatever becomes of them in
coordinator/lorica_coordinator/edges/database/round_tables.py. A database from before there were revisions is taken over
by this one: releases of version 4 added three of the tables as they first opened it, so one that is missing is made.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = None

tables = sa.MetaData()

sa.Table("schema", tables, sa.Column("version", sa.Integer, primary_key=True, autoincrement=False))
sa.Table(
    "machine",
    tables,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("version", sa.Integer, nullable=False),
    sa.Column("phase", sa.String(32), nullable=False),
    sa.Column("state", sa.Text, nullable=False),
)
sa.Table(
    "silos",
    tables,
    sa.Column("silo", sa.String(63), primary_key=True),
    sa.Column("identity_public_key", sa.LargeBinary(32), nullable=False),
    sa.Column("certificate_serial", sa.String(64), nullable=False),
    sa.Column("certificate_digest", sa.String(64), nullable=False),
    sa.Column("certificate_expires", sa.Float, nullable=False),
    sa.Column("enrolled_at", sa.Float, nullable=False),
    sa.Column("last_seen", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
)
sa.Table(
    "certificates",
    tables,
    sa.Column("serial", sa.String(64), primary_key=True),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("uri", sa.String(255), nullable=False, index=True),
    sa.Column("issued_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("revoked_at", sa.Float),
)
sa.Table(
    "invitations",
    tables,
    sa.Column("secret_digest", sa.LargeBinary(32), primary_key=True),
    sa.Column("silo", sa.String(63), nullable=False, index=True),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("pin", sa.String(64), nullable=False),
    sa.Column("spent_at", sa.Float),
)
sa.Table(
    "plans",
    tables,
    sa.Column("digest", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(63), nullable=False),
    sa.Column("begun_at", sa.Float, nullable=False),
)
sa.Table(
    "rounds",
    tables,
    sa.Column("plan", sa.String(64), sa.ForeignKey("plans.digest"), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("opened_at", sa.Float, nullable=False),
    sa.Column("closed_at", sa.Float),
    sa.Column("model", sa.String(64), nullable=False),
    sa.Column("weight_fallback", sa.Boolean, nullable=False),
    sa.Column("weight_sum", sa.Float),
    sa.Column("saturated", sa.Integer),
    sa.Column("coordinates", sa.Integer),
    sa.Column("macro_exact_match", sa.Float),
    sa.Column("micro_exact_match", sa.Float),
)
sa.Table(
    "updates",
    tables,
    sa.Column("plan", sa.String(64), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("silo", sa.String(63), sa.ForeignKey("silos.silo"), primary_key=True),
    sa.Column("outcome", sa.String(16), nullable=False),
    sa.Column("detail", sa.Text, nullable=False),
    sa.Column("update_digest", sa.String(64)),
    sa.Column("signature", sa.LargeBinary(64)),
    sa.Column("examples", sa.Integer, nullable=False),
    sa.Column("loss_max", sa.Float, nullable=False),
    sa.Column("loss_min", sa.Float, nullable=False),
    sa.Column("loss_first", sa.Float, nullable=False),
    sa.Column("loss_last", sa.Float, nullable=False),
    sa.Column("optimizer_steps", sa.Integer, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("delta_norm", sa.Float, nullable=False),
    sa.Column("weight", sa.Float, nullable=False),
    sa.Column("share", sa.Float, nullable=False),
    sa.Column("capped", sa.Boolean, nullable=False),
    sa.Column("committed_at", sa.Float),
    sa.ForeignKeyConstraint(["plan", "round", "attempt"], ["rounds.plan", "rounds.round", "rounds.attempt"]),
)
sa.Table(
    "evaluations",
    tables,
    sa.Column("plan", sa.String(64), sa.ForeignKey("plans.digest"), primary_key=True),
    sa.Column("round", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("silo", sa.String(63), sa.ForeignKey("silos.silo"), primary_key=True),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("model", sa.String(64), nullable=False),
    sa.Column("split", sa.String(8), nullable=False),
    sa.Column("examples", sa.Integer, nullable=False),
    sa.Column("exact_matches", sa.Integer, nullable=False),
    sa.Column("executed", sa.Integer, nullable=False),
    sa.Column("execution_matches", sa.Integer, nullable=False),
    sa.Column("loss_per_token", sa.Float, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("reported_at", sa.Float, nullable=False),
)
sa.Table(
    "checkpoints",
    tables,
    sa.Column("plan", sa.String(64), sa.ForeignKey("plans.digest"), primary_key=True),
    sa.Column("model", sa.String(64), primary_key=True),
    sa.Column("round", sa.Integer, nullable=False),
    sa.Column("signature", sa.LargeBinary(64), nullable=False),
    sa.Column("made_at", sa.Float, nullable=False),
)
sa.Table(
    "ledger_heads",
    tables,
    sa.Column("silo", sa.String(63), primary_key=True),
    sa.Column("sequence", sa.BigInteger, nullable=False),
    sa.Column("digest", sa.String(64), nullable=False),
    sa.Column("shown_at", sa.Float, nullable=False),
)
sa.Table(
    "held_trust",
    tables,
    sa.Column("uri", sa.String(255), primary_key=True),
    sa.Column("authority", sa.String(64), nullable=False),
    sa.Column("trust", sa.String(64), nullable=False),
    sa.Column("sent_serial", sa.String(64), nullable=False),
    sa.Column("sent_authority", sa.String(64), nullable=False),
    sa.Column("sent_trust", sa.String(64), nullable=False),
)
sa.Table(
    "successions",
    tables,
    sa.Column("silo", sa.String(63), primary_key=True),
    sa.Column("predecessor", sa.LargeBinary(32), primary_key=True),
    sa.Column("successor", sa.LargeBinary(32), nullable=False),
    sa.Column("statement", sa.LargeBinary(64), nullable=False),
    sa.Column("succeeded_at", sa.Float, nullable=False),
)


def upgrade() -> None:
    connection = op.get_bind()
    tables.create_all(connection)
    version = tables.tables["schema"]
    if connection.execute(sa.select(version.c.version)).first() is None:
        connection.execute(sa.insert(version).values(version=4))


def downgrade() -> None:
    raise NotImplementedError("before revision 0004 there were no revisions")
