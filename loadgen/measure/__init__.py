"""What a record says: every metric, from the raw times alone."""
