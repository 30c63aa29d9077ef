"""What a coordinator costs whose state, files and log are in PostgreSQL and a bucket."""
