"""What the deltas of a round come to: one file for each reducer, which makes the next model of them."""
