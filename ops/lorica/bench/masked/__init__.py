"""What masks cost: CPU, memory, bytes."""
