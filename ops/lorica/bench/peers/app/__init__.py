"""What runs inside a peer, in that peer's own virtual environment: it imports the peer, numpy and nothing of Lorica."""
