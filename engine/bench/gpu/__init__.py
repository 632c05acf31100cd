"""What the benchmarks on a GPU share: the engine in this process, lengths, windows of steady state, profiles, the load
generator as a process, and their common flags.

They all run on a CPU too, with `--device cpu --quick`: that rehearses every line and measures nothing.
"""
