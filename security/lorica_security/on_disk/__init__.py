"""Audit logs and privacy ledgers as files: appended to, synced, never rewritten."""
