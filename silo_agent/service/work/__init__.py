"""What a piece of an agent's work does: prepare, fetch, train, mask, upload, evaluate, and how it is told of and paid
for."""
