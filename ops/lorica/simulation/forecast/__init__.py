"""What a plan will take of time, wire, memory and disk, before it is run."""
