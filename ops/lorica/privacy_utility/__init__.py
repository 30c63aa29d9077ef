"""`lorica privacy-utility`: what differential privacy costs in accuracy."""
