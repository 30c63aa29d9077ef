"""Files and records in the silo's folder, apart from keys and what masking must remember."""
