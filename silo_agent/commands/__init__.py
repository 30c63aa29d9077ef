"""The `silo-agent` command, one module for each group of its subcommands."""
