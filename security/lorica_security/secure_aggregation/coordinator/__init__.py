"""The coordinator's side: states, events and effects of an attempt, and the table between them."""
