"""`lorica bench-many`: one round of as many silos as a machine holds, each a process of its own."""
