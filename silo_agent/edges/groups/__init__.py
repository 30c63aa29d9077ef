"""This silo's release groups: the chain that it holds, and how it comes back to it."""
