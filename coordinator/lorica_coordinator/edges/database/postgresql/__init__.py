"""The coordinator's state in PostgreSQL: which database is meant, and how it is spoken to."""
