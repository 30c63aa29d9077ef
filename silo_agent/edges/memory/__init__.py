"""What a silo must never forget of masked rounds: pins, models it saw, masked attempts; each counts its changes."""
