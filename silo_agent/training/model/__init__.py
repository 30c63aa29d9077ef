"""The T5 of a plan: made or read, checked against the plan, its parameters as one flat vector."""
