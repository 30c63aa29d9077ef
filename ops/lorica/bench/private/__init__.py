"""What record-level privacy costs beside plain training."""
