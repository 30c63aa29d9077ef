"""Other systems at the same work as Lorica's rounds: each installed from PyPI, in its real deployment, on loopback."""
