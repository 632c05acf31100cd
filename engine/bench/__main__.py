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
