"""`lorica bench-log`: what an entry of the audit log costs, in files and in rows."""
