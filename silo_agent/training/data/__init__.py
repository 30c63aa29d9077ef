"""A silo's examples: read, put into text, tokenised, grouped into batches."""
