"""Where a coordinator that is measured has its state and files, if not in its folder alone."""
