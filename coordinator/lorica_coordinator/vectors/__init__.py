"""Flat vectors and models as files, and the memory that they pass through."""
