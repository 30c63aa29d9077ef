"""What people and monitoring are told of a federation, from its state and records."""
