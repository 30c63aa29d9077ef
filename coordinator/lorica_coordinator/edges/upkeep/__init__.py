"""What keeps a federation for years: backup, restore, upgrade, garbage collection."""
