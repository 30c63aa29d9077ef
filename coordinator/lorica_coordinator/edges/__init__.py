"""Where the coordinator meets the world: network, files, database, metrics."""
