"""What of the state folder is kept in a bucket of an S3 server, so that a coordinator elsewhere can go on with it."""
