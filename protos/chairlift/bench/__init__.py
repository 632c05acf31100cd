"""The frame that benchmarks of the engine and experiments with whole servers share.

`benchmark` defines a benchmark, `alternate` runs systems in turn, `workload` draws prompts and lengths, `report` writes
the table and the raw samples. It imports neither the engine nor the load generator.
"""
