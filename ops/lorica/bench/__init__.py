"""A round's infrastructure, measured: Lorica beside its peers."""
