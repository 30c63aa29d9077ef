"""Training under record-level differential privacy: clip each example, add noise, account."""
