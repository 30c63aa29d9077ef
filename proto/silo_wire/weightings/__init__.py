"""What a silo's delta counts: one file for each weighting, a value that plans, silos and the coordinator read."""
