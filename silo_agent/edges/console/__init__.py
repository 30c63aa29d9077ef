"""What people and monitoring see of the agent: terminal, log, metrics."""
