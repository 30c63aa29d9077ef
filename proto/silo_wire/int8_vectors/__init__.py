"""Updates in int8, in blocks of 1,024 numbers with a scale each: their bytes, how a silo rounds to them, how they are
read."""
