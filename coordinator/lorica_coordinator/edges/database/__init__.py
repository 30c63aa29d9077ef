"""The coordinator's durable state in a database: tables, their revisions, and the store over them."""
