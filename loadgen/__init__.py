"""The load generator: open-loop arrivals against the pair, latency counted from the scheduled time."""

__version__ = "0.1.0"
