"""`replay`: a production trace, open loop."""

import argparse

from loadgen.cli.run_options import (
    add_run_arguments,
    run_or_describe,
)
from loadgen.cli.workload_options import add_trace_arguments, workload


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="run a production trace",
        description="Runs a trace on its own clock, whatever the server does; latency counts from when it was due.",
    )
    add_trace_arguments(parser)
    add_run_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    return run_or_describe(workload(options), options, "replay")
