"""What a run runs: a trace that is cut and scaled, or a made-up data set on a made-up schedule."""

import argparse
from pathlib import Path

from loadgen.cli.synthetic_options import (
    SYNTHETIC_FLAGS,
    add_dataset_arguments,
    add_schedule_arguments,
    synthetic_workload,
)
from loadgen.cli.trace_options import TRACE_FLAGS, add_cutting_arguments, add_reading_arguments, read, transformed
from loadgen.errors import OptionError
from loadgen.trace.schema import Trace


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a replayed trace, with `--seed`. A parser may have these and the synthetic ones."""
    group = parser.add_argument_group("trace")
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="azure, mooncake, burstgpt, bailian, servegen or jsonl; .gz too"
    )
    add_reading_arguments(group)
    add_cutting_arguments(group)


def add_synthetic_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of a data set and its schedule, with `--seed`."""
    add_dataset_arguments(parser.add_argument_group("data set"))
    add_schedule_arguments(parser.add_argument_group("schedule"))


def workload(options: argparse.Namespace) -> Trace:
    """Returns the workload that the flags describe, with arrivals in seconds from the start of the run.

    Args:
        options: of a parser with the flags of one or both functions above.

    Raises:
        OptionError: flags contradict each other, are missing, or leave nothing to run.
        TraceError: a file cannot be read.
    """
    trace = getattr(options, "trace", None)
    dataset = getattr(options, "dataset", None)
    if trace is not None and dataset is not None:
        raise OptionError(f"--trace {trace} and --dataset {dataset} both say what to run; give one of them")
    if trace is None and dataset is None and hasattr(options, "trace"):
        raise OptionError("--trace FILE is missing" if not hasattr(options, "dataset") else "give --trace or --dataset")
    kind, useless = ("--dataset", TRACE_FLAGS) if trace is None else ("--trace", SYNTHETIC_FLAGS)
    for name in useless:
        if getattr(options, name, None):
            raise OptionError(f"--{name.replace('_', '-')} does nothing with {kind}; leave it out")
    return synthetic_workload(options) if trace is None else transformed(read(trace, options), options)
