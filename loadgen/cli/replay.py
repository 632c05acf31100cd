"""`replay`: a production trace, open loop."""

import argparse

from chairlift.service.flags import FlagParser
from loadgen.cli.run_options import add_run_arguments, run_or_describe
from loadgen.cli.workload_options import add_trace_arguments, workload


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Replays a trace open loop: a slow server delays no request. Latency counts from the due time.",
    )
    add_trace_arguments(parser)
    add_run_arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    return run_or_describe(workload(options), options, "replay")
