"""The frontend: text, queueing and streaming. It never sees a block id and imports no torch."""

__version__ = "0.1.0"
