"""The batching experiment: one engine, static and continuous batching, seat by seat."""
