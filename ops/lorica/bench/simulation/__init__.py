"""How fast a simulated federation runs."""
