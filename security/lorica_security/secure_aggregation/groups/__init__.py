"""Release groups: which silos are summed together or not at all, and how that changes."""
