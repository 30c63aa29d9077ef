"""What an entry of a privacy ledger says was released: one file for each mechanism, a value that ledgers, budgets and
pages read."""
