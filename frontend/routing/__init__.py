"""The stream to the engine: its messages, the requests under way on it, and what waits to be sent."""
