"""The accounting of differential privacy: what releases cost together, in a ledger that nobody can shorten."""
