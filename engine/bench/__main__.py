"""`python -m engine.bench`: runs one benchmark of the engine, see `chairlift.bench.command`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict

import engine.bench
from chairlift.bench.command import find_benchmarks, run_command
from engine.bench.machine import Floors, Machine, measure_floors
from engine.errors import CheckpointError, ConfigError

_EXPERIMENTS = "loadgen.experiments"
# Former names of the experiments with whole servers: they work for one release.
_MOVED = {
    name: f"{_EXPERIMENTS} {name}"
    for name in (
        *("failover", "R1", "R2", "frontend-cost", "C17", "wire-latency", "C18", "wire-throughput", "C19", "peers"),
        *("transformers-batches", "transformers-generate", "C2", "C3", "transformers-generate-batch", "C4"),
    )
} | {
    "doors": f"{_EXPERIMENTS} endpoints",
    "static-batching": f"{_EXPERIMENTS}.batching",
    "C1": f"{_EXPERIMENTS}.batching",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(
        "engine.bench",
        find_benchmarks(engine.bench),
        argv,
        machine=asdict(Machine.here()),
        errors=(CheckpointError, ConfigError),
        measure_floors=_floors,
        moved=_MOVED,
    )


def _floors(threads: int, quick: bool) -> Floors:
    try:
        return measure_floors(threads, quick=quick)
    except ValueError as error:
        raise ConfigError(f"--threads: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
