"""Scheduling and KV-cache bookkeeping in pure Python: no torch, no gRPC, no clock, no environment."""
