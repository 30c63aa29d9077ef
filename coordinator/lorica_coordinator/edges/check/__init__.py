"""`coordinator check`: what could keep this federation from working, found before silos do."""
