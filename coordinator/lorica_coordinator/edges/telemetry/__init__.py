"""Metrics and logs of the coordinator."""
