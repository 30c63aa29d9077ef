"""The commands of `lorica`, by what they are for."""
