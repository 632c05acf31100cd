"""Batching experiment: static and continuous batching in the same engine, slot by slot."""
