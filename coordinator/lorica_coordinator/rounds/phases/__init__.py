"""The handlers of the round machine, one file a phase, and below them what several phases enter or check."""
