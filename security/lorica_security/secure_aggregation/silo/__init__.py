"""A silo's side: states, events and effects of an attempt, the table between them, and what a silo remembers."""
