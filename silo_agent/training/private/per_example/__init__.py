"""Losses and gradient norms of single examples, whatever else is in the batch."""
