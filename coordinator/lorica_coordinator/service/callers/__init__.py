"""What silos and operators may ask of the coordinator, a file for each of them."""
