"""Experiments that start servers and measure them: each states a claim, a goal and a method.

    python -m loadgen.experiments list
    python -m loadgen.experiments NAME [--rounds 5] [--out bench-results] [--threads N] [--quick]
    python -m loadgen.experiments.batching

`pair` starts an engine and a frontend, `killable` servers whose engines can be killed, `client` has thin clients, and
`systems` compares systems under test in turn. What needs an engine or torch runs in a worker process (`peers.worker`).
"""
