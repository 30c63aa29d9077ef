"""What both long-running programs do beside their work: heartbeat, metrics port, clock watch, sealed log."""
