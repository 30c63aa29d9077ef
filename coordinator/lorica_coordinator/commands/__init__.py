"""The `coordinator` command, one module for each group of its subcommands."""
