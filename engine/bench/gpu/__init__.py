"""Shared parts of the benchmarks on a GPU: an engine in this process, lengths, steady-state windows, profiles, the load
generator as a process, and common flags.

With `--device cpu --quick` they run on a CPU, which tests them and measures nothing.
"""
