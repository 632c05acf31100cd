"""`python -m loadgen.experiments`: runs one experiment, see `chairlift.bench.command`."""

import sys
from collections.abc import Sequence

from chairlift.bench.command import run_command
from loadgen.errors import LoadgenError
from loadgen.experiments.benchmarks import BENCHMARKS
from loadgen.host import describe_host


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(
        "loadgen.experiments",
        BENCHMARKS,
        argv,
        machine={**describe_host(), "cpu_flags": ()},
        errors=(LoadgenError,),
    )


if __name__ == "__main__":
    sys.exit(main())
