"""peers: PLACEHOLDER docstring."""
