"""The tables of the coordinator's state, the same in SQLite and in PostgreSQL.

Times are Unix seconds. A row of `machine` and the rows of the other tables change in one transaction.

A change of these tables is a new revision in coordinator/lorica_coordinator/edges/database/migrations, and a new
TABLES_REVISION. Alembic keeps the revision in a table of its own; `schema` says the same to releases from before there
were revisions, which refuse what they do not know.
"""

from sqlalchemy import (
    DDL,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    event,
)

TABLES_REVISION = "0013"
FIRST_REVISION = "0004"
"""Of a database from before there were revisions, whose `schema` holds 4."""
TABLES_VERSION = int(TABLES_REVISION)

_COUNT = Integer().with_variant(BigInteger(), "postgresql")
"""SQLite's integers have 64 bits whatever they are called."""

metadata = MetaData()


def _added_to(name: str) -> Table:
    """Of lines that name each other (postgresql/chained_rows.py): in SQLite it stays empty, the lines are in files."""
    return Table(
        name,
        metadata,
        Column("sequence", BigInteger, primary_key=True, autoincrement=False),
        Column("previous", String(64), nullable=False, unique=True),
        Column("line", Text, nullable=False),
    )


revisions = Table("alembic_version", metadata, Column("version_num", String(32), primary_key=True))

schema = Table("schema", metadata, Column("version", Integer, primary_key=True, autoincrement=False))

machine = Table(
    "machine",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1: there is one
    Column("version", Integer, nullable=False),
    Column("phase", String(32), nullable=False),
    Column("state", Text, nullable=False),
    Column("events", Integer, nullable=False, server_default="0"),  # how many rows masked_events has
    # Where a masked attempt is sealed: what `state` would have of it, and whether its silos were asked for shares.
    Column("sealed", LargeBinary),
    Column("asked", Boolean),
    Column("sealed_under", String(64)),  # which key, by its name (sealing/attempt_keys.py)
    Column("saved_as", String(32)),  # the newest transition, by a name that nobody else has
)

leadership = Table(  # in PostgreSQL: whose state this is, and which process may write it
    "leadership",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1: there is one
    Column("federation", String(63), nullable=False),
    Column("identity", String(64), nullable=False),  # the coordinator's identity key, in hexadecimal
    Column("term", BigInteger, nullable=False),
    Column("holder", String(255), nullable=False),  # for people
    Column("token", String(32), nullable=False, server_default=""),  # of the term: random, no term has that of another
)

masked_events = Table(
    "masked_events",
    metadata,
    Column("position", Integer, primary_key=True, autoincrement=False),  # 1, 2, ... in the order of the journal
    Column("event", LargeBinary, nullable=False),
)

silos = Table(
    "silos",
    metadata,
    Column("silo", String(63), primary_key=True),
    Column("identity_public_key", LargeBinary(32), nullable=False),
    Column("certificate_serial", String(64), nullable=False),
    Column("certificate_digest", String(64), nullable=False),
    Column("certificate_expires", Float, nullable=False),
    Column("enrolled_at", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
    Column("revoked_at", Float),
    Column(
        "agent_version", String(64), nullable=False, default="", server_default=""
    ),  # "": it has not connected since
    Column("agent_wire", String(16), nullable=False, default="", server_default=""),
    Column("announced", LargeBinary(32)),  # digest of its newest advertisement of secure aggregation
)

certificates = Table(  # all that were issued and have not expired long ago
    "certificates",
    metadata,
    Column("serial", String(64), primary_key=True),
    Column("digest", String(64), nullable=False),
    Column("uri", String(255), nullable=False, index=True),
    Column("issued_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("revoked_at", Float),
)

invitations = Table(
    "invitations",
    metadata,
    Column("secret_digest", LargeBinary(32), primary_key=True),
    Column("silo", String(63), nullable=False, index=True),
    Column("expires_at", Float, nullable=False),
    Column("pin", String(64), nullable=False),
    Column("spent_at", Float),
)

plans = Table(
    "plans",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("name", String(63), nullable=False),
    Column("begun_at", Float, nullable=False),
    Column("deletions", Integer, nullable=False, default=0, server_default="0"),  # how often details of it were deleted
)

rounds = Table(
    "rounds",
    metadata,
    Column("plan", String(64), ForeignKey("plans.digest"), primary_key=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("outcome", String(16), nullable=False),
    Column("detail", Text, nullable=False, default=""),
    Column("opened_at", Float, nullable=False),
    Column("closed_at", Float),
    Column("model", String(64), nullable=False),
    Column("weight_fallback", Boolean, nullable=False, default=False),
    Column("weight_sum", Float),  # of a masked sum, like the two below
    Column("saturated", _COUNT),
    Column("coordinates", _COUNT),
    Column("macro_exact_match", Float),
    Column("micro_exact_match", Float),
    Column("scored", Integer),  # of how many silos macro_exact_match is the mean
)

updates = Table(
    "updates",
    metadata,
    Column("plan", String(64), primary_key=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("attempt", Integer, primary_key=True, autoincrement=False),
    Column("silo", String(63), ForeignKey("silos.silo"), primary_key=True),
    Column("outcome", String(16), nullable=False),
    Column("detail", Text, nullable=False, default=""),
    Column("update_digest", String(64)),
    Column("signature", LargeBinary(64)),
    Column("examples", _COUNT, nullable=False, default=0),
    Column("loss_max", Float, nullable=False, default=0.0),
    Column("loss_min", Float, nullable=False, default=0.0),
    Column("loss_first", Float, nullable=False, default=0.0),
    Column("loss_last", Float, nullable=False, default=0.0),
    Column("optimizer_steps", _COUNT, nullable=False, default=0),
    Column("seconds", Float, nullable=False, default=0.0),
    Column("delta_norm", Float, nullable=False, default=0.0),
    Column("weight", Float, nullable=False, default=0.0),
    Column("share", Float, nullable=False, default=0.0),
    Column("capped", Boolean, nullable=False, default=False),
    Column("committed_at", Float),
    ForeignKeyConstraint(["plan", "round", "attempt"], ["rounds.plan", "rounds.round", "rounds.attempt"]),
)

evaluations = Table(
    "evaluations",
    metadata,
    Column("plan", String(64), ForeignKey("plans.digest"), primary_key=True),
    Column("round", Integer, primary_key=True, autoincrement=False),
    Column("silo", String(63), ForeignKey("silos.silo"), primary_key=True),
    Column("attempt", Integer, nullable=False),
    Column("model", String(64), nullable=False),
    Column("split", String(8), nullable=False),
    Column("examples", _COUNT, nullable=False),
    Column("exact_matches", _COUNT, nullable=False),
    Column("executed", _COUNT, nullable=False),
    Column("execution_matches", _COUNT, nullable=False),
    Column("loss_per_token", Float, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("reported_at", Float, nullable=False),
)

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("plan", String(64), ForeignKey("plans.digest"), primary_key=True),
    Column("model", String(64), primary_key=True),
    Column("round", Integer, nullable=False),
    Column("signature", LargeBinary(64), nullable=False),
    Column("made_at", Float, nullable=False),
)

ledger_heads = Table(
    "ledger_heads",
    metadata,
    Column("silo", String(63), primary_key=True),  # by name: it outlives an enrolment under other keys
    Column("sequence", BigInteger, nullable=False),
    Column("digest", String(64), nullable=False),
    Column("shown_at", Float, nullable=False),
)

held_trust = Table(
    "held_trust",
    metadata,
    Column("uri", String(255), primary_key=True),
    Column("authority", String(64), nullable=False),
    Column("trust", String(64), nullable=False),
    Column("sent_serial", String(64), nullable=False, default=""),  # "": nothing is on its way
    Column("sent_authority", String(64), nullable=False, default=""),
    Column("sent_trust", String(64), nullable=False, default=""),
)

successions = Table(
    "successions",
    metadata,
    Column("silo", String(63), primary_key=True),
    Column("predecessor", LargeBinary(32), primary_key=True),
    Column("successor", LargeBinary(32), nullable=False),
    Column("statement", LargeBinary(64), nullable=False),
    Column("succeeded_at", Float, nullable=False),
)

release_groups = Table(
    "release_groups",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("number", Integer, nullable=False),
    Column("stands", Boolean, nullable=False),  # false: it is proposed, of which there is one at most
    Column("colluders", Integer, nullable=False),  # as the link has it
    Column("signed", LargeBinary, nullable=False),  # the link and its signatures, as they travel
)

audit_log = _added_to("audit_log")

release_ledger = _added_to("release_ledger")

closed_plans = Table("closed_plans", metadata, Column("plan", String(64), primary_key=True))

release_root = Table(
    "release_root",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1: there is one
    Column("sealed", LargeBinary, nullable=False),
)

ADDED_TO = (audit_log, release_ledger, closed_plans, release_root)
"""No row is changed or deleted: in PostgreSQL the server refuses it."""

_ONLY_ADDED_TO = (
    "CREATE FUNCTION lorica_added_to_alone() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
    "RAISE EXCEPTION 'rows of %% are never changed or deleted', TG_TABLE_NAME; END $$",
    *(
        f"CREATE TRIGGER {table.name}_is_added_to BEFORE UPDATE OR DELETE OR TRUNCATE ON {table.name} "
        "FOR EACH STATEMENT EXECUTE FUNCTION lorica_added_to_alone()"
        for table in ADDED_TO
    ),
)
for _statement in _ONLY_ADDED_TO:
    _trigger = DDL(_statement).execute_if(dialect="postgresql")  # type: ignore[no-untyped-call]
    event.listen(metadata, "after_create", _trigger)
