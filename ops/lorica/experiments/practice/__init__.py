"""Public data that a model is warmed up on, and random checkpoints in the form of real ones."""
