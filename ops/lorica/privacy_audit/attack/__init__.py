"""Attacks on the promise of privacy by canaries: what a number of right guesses proves."""
