"""Rounds under random kills: what no kill may change."""
