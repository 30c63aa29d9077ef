"""The coordinator's side: the phases, events and effects of an attempt, the table between them, and what silos are asked."""
