"""Rows of a masked attempt, sealed under a key that is never in the database: the attempt ends with its key."""
