"""Benchmarks of the engine: each states a claim, a goal and a method, and prints ratios of one alternating run.

    python -m engine.bench list
    python -m engine.bench NAME [--rounds 5] [--out bench-results] [--threads N] [--quick]

`benchmarks` lists them. They share `chairlift.bench` (command line, settings, alternating runs, workloads, reports),
`machine` and `cpu_floors` (this machine and its rates), `shapes` (models), `serve` (an engine in this process),
`agreement` (checks of greedy ids), and, for variants of one engine, `engine_options`, `fresh_scheduler` and `rounds`.
Nothing imports this package. Experiments with whole servers are in `loadgen.experiments`.
"""
