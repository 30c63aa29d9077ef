"""The coordinator of a federation: it plans rounds, adds up updates, and never sees data."""
