"""`run`: a synthetic workload, open loop by rate or closed loop by concurrency."""

import argparse

from chairlift.service.flags import FlagParser
from loadgen.cli.flags import add_flags
from loadgen.cli.run_options import CONCURRENCY_FLAG, add_run_arguments, run_or_describe
from loadgen.cli.workload_options import add_synthetic_arguments, workload


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Sends a synthetic workload, by rate (open loop) or a fixed number at once (closed loop).",
    )
    add_synthetic_arguments(parser)
    add_flags(parser, [CONCURRENCY_FLAG])
    add_run_arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    return run_or_describe(workload(options), options, "run")
