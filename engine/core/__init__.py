"""Scheduler and KV cache accounting in pure Python: no torch, gRPC, clock or environment."""
