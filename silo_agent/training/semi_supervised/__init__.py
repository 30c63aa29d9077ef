"""Training on questions without answers: a teacher answers them, and a student learns to be sure of what it answers."""
