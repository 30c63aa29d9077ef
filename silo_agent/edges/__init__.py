"""Where the agent meets the world: network, files, databases, terminal."""
