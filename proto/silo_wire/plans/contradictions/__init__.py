"""What in a plan does not go together, said key by key."""
