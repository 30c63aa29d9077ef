"""`silo-agent check`: what could keep this silo from taking part, found before a round does."""
