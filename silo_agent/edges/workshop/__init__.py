"""Training, scoring and SQL behind one port, with the data and the device of this silo."""
