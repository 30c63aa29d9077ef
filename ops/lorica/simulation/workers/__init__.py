"""Silos trained in parallel: processes, their messages, and one model for each's share."""
