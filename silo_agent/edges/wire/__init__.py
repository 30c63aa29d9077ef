"""The agent as a client: one channel to the coordinator, its certificate, its calls."""
