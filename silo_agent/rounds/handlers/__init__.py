"""The handlers of the agent's machine: one file for each kind of order or result, above what several of them do."""
