"""One round of local training, and what is scored; no network and no policy."""
