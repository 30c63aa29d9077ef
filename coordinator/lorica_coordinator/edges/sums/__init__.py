"""Committed updates become the next model here: in the clear, from masks, or with noise."""
