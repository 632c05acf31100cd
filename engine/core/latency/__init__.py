"""Scheduling by latency targets: docs/scheduling.md."""
