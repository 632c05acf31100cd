"""Checks whether a run is valid: everything that can distort it, with limits, and the verdict."""
