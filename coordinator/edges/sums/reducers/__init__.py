"""What the deltas of a round come to: one file for each reducer, which turns what silos committed into the next model."""
