"""From a trained model to the file that leaves: delta, residual, spreading, range, masks."""
