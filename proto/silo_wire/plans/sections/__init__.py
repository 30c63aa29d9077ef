"""The sections of a plan, a file for each subject: keys, bounds and defaults."""
