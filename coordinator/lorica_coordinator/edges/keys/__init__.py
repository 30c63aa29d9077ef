"""The coordinator's folder, and the keys and authorities in it."""
