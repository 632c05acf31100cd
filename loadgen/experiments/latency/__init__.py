"""Scheduling by latency on a real pair: the twin's predictions, the governor's guarantee."""
