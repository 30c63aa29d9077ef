"""Tables and pictures of ops/docs that follow from the code."""
