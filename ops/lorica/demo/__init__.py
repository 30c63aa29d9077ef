"""What `make demo` federates: four synthetic silos, public and generated, none of them derived from real records."""
