"""Model folders as data in a closed form, read by a child process; models and tokenizers made from a seed."""
