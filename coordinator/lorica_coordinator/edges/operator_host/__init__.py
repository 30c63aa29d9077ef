"""What an operator's own machine runs: its key, its client, `coordinator watch`, an export that arrives."""
