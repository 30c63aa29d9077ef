"""Key agreement and secret sharing between the silos of one attempt."""
