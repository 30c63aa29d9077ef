"""What left this silo, for whoever answers for its data: privacy ledger, shared budget, audit log."""
