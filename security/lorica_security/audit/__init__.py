"""Audit logs: chained entries, signed heads, and how a stranger verifies them."""
