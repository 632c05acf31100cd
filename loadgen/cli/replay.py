"""`replay`: a production trace, open loop."""

import argparse

from loadgen.cli.run_options import (
    add_play_arguments,
    add_report_arguments,
    add_target_arguments,
    exit_status,
    result_folder,
    run_and_report,
)
from loadgen.cli.workload_options import add_trace_arguments, describe, workload


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the verb."""
    parser = subparsers.add_parser(
        "replay",
        help="play a production trace",
        description="Plays a trace on its own clock, whatever the server does; latency counts from when it was due.",
    )
    add_trace_arguments(parser)
    add_target_arguments(parser)
    add_play_arguments(parser)
    add_report_arguments(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Plays it; returns the exit status."""
    trace = workload(options)
    print(describe(trace))
    if options.dry_run:
        return 0
    return exit_status(run_and_report(trace, options, result_folder(options, "replay")), options)
