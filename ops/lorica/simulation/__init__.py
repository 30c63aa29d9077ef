"""A whole federation in one process: the same round machine, arithmetic and training, and no network (`lorica
simulate`)."""
