"""The silo's keys on disk, and what it signs with them."""
