"""All metrics, computed from the raw times alone."""
