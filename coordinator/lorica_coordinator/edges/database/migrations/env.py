"""What Alembic runs: the migrations of the connection that it is given, in the transaction that is open there."""

from alembic import context

from lorica_coordinator.edges.database.round_tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
