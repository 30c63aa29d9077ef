"""The machine that a program runs on: private files, locks, memory, limits, a full disk."""
