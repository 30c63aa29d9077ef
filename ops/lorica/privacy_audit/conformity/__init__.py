"""Target `conformity`: every noised step on a tape, held against the ledger."""
