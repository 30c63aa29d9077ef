"""Plan folders: what the operator edits, and how it becomes the plan bundle that silos approve."""
