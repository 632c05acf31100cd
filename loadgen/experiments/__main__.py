"""`python -m loadgen.experiments`: runs one experiment, see `chairlift.bench.command`."""

import sys
from collections.abc import Sequence

import loadgen.experiments
from chairlift.bench.command import find_benchmarks, run_command
from loadgen.errors import LoadgenError
from loadgen.host import describe_host


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    return run_command(
        "loadgen.experiments",
        find_benchmarks(loadgen.experiments),
        argv,
        machine={**describe_host(), "cpu_flags": ()},
        errors=(LoadgenError,),
    )


if __name__ == "__main__":
    sys.exit(main())
