"""What hostile silos do in a simulated federation: attacks of the literature, on deltas, claims and training data."""
