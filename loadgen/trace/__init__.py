"""Traces: requests of production as arrival times, lengths and shared prefixes. Reading, cutting and scaling them."""
