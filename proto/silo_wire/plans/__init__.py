"""The plan and its parts: what an operator asks for, and a silo approves by digest."""
