"""Benchmarks of the engine: each states a claim, a goal and a method, and prints ratios of one alternating run.

    python -m engine.bench list
    python -m engine.bench NAME [--rounds 5] [--out bench-results] [--threads N] [--quick]

The frame is `benchmark` (what a benchmark is), `registry` (finds them), `measure` (runs contestants in turn), `machine`
(what the hardware can do), `shapes` (models), `workload` (prompts and lengths), `serve` (an engine in this process),
`agreement` (are the ids right) and `report` (table and raw samples). Systems that run in processes of their own meet in
a `contest`; `wire` has ours over gRPC, `openvino` a peer. Contestants that are one engine with other limits share
`engine_options`, `fresh_scheduler` and `rounds`. Every other module that has a `BENCHMARK` is one.
Nothing may import this package: it is the engine's outermost edge.
"""
