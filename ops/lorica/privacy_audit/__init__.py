"""An attack on our own promise: canary records, guesses about them from what
was released, and what the guesses prove of epsilon.
"""
