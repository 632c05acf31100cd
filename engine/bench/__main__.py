"""`python -m engine.bench`: runs one benchmark of the engine, see `chairlift.bench.command`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.command import run_command
from engine.bench.benchmarks import BENCHMARKS
from engine.bench.gpu.wheels import carried_wheels
from engine.bench.machine import Machine
from engine.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from engine.bench.cpu_floors import Floors

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
    try:
        with carried_wheels():
            return run_command(
                "engine.bench",
                BENCHMARKS,
                argv,
                machine=asdict(Machine.here()),
                errors=(CheckpointError, ConfigError),
                measure_floors=_floors,
                moved=_MOVED,
            )
    except BenchmarkError as error:
        print(f"engine.bench: error: {error}", file=sys.stderr)
        return 1


def _floors(threads: int, quick: bool) -> "Floors":
    from engine.bench.cpu_floors import measure_floors  # and with it numba, which a machine with a GPU may lack

    try:
        return measure_floors(threads, quick=quick)
    except ValueError as error:
        raise ConfigError(f"--threads: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
