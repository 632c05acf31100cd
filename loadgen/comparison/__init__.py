"""Compares two sides request by request: ratios with confidence intervals, of stored runs or of runs made in turn."""
