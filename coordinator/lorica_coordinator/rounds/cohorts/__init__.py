"""Who is in a round, and whether a masked sum can come out of those who are there."""
