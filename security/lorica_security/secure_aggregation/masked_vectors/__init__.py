"""Vectors as integers under masks: fixed point, key streams, noise shares, scores."""
