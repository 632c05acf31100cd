"""`run`: a synthetic workload, open loop by rate or closed loop by concurrency."""

import argparse

from chairlift.service.flag_kinds import integer
from chairlift.service.flags import Flag, FlagParser
from loadgen.cli.flags import add_flags
from loadgen.cli.run_options import add_run_arguments, run_or_describe
from loadgen.cli.workload_options import add_synthetic_arguments, workload
from loadgen.errors import OptionError


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Runs drawn requests at a rate (open loop), or a fixed number at once (closed loop).",
    )
    add_synthetic_arguments(parser)
    text = "closed loop with this many requests in flight; a slow server lowers its own load"
    add_flags(parser, [Flag("--concurrency", text, integer(1))])
    add_run_arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    if options.concurrency is not None and options.max_concurrency is not None:
        raise OptionError("--concurrency and --max-concurrency: the one is a closed loop, the other caps an open one")
    return run_or_describe(workload(options), options, "run")
