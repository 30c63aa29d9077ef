"""What an agent calls at the coordinator: orders, downloads, evidence, uploads, each tried again until it is
answered."""
