"""A study: set-ups x seeds x hyperparameters, each through the simulated federation (`lorica experiment`)."""
