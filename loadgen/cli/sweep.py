"""`sweep`: the same requests at one load after the other, and the highest load that keeps the limits."""

import argparse
import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from chairlift.service.flag_kinds import ANY_TEXT, integer, number, switch
from chairlift.service.flags import Flag, FlagParser
from loadgen.cli.flags import ExitStatus, add_flags
from loadgen.cli.result_folder import part_of_results, result_folder
from loadgen.cli.run_options import (
    add_run_arguments,
    check_run_flags,
    measure_options,
    run_and_report,
)
from loadgen.cli.values import ABOVE_ZERO
from loadgen.cli.workload_options import add_synthetic_arguments, add_trace_arguments, workload
from loadgen.cli.workload_text import describe
from loadgen.errors import OptionError
from loadgen.report.sweep_files import PAGE, write_sweep
from loadgen.report.sweep_text import sweep_lines
from loadgen.sweep.capacity import TARGETS, settled
from loadgen.sweep.load_level import UNITS, Axis, LoadLevel, load_level_of
from loadgen.sweep.rates import ladder
from loadgen.sweep.sweep import Sweep, sweep
from loadgen.synthetic import MAX_REQUESTS, with_arrivals
from loadgen.target.base import without_credentials
from loadgen.trace.schema import Trace
from loadgen.trace.window import at_rate, limit

_LEVEL_FLAGS = (
    Flag("--level-duration", "approximate duration of each load level (default: all requests at each)", ABOVE_ZERO),
    Flag("--bisect", "search between load levels for the highest load within the limits", switch()),
    Flag("--precision", "--bisect: relative precision (default: 0.05)", number(above=0, below=1), "SHARE", 0.05),
    Flag("--probes", "--bisect: maximum runs per limit (default: 8)", integer(1), default=8),
    Flag("--retries", "maximum repetitions of an INVALID load level (default: 1)", integer(0), default=1),
    Flag("--keep-going", "continue beyond saturation", switch()),
)


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Runs the workload at each load level in ascending order, with new prompts, until the server is "
        "saturated. LEVELS is 1,2,4 or FROM:TO:xFACTOR (1:64:x1.5) or FROM:TO:+STEP (1:8:+1).",
    )
    group = parser.add_argument_group("load levels")
    loads = group.add_mutually_exclusive_group(required=True)
    add_flags(
        loads,
        [
            Flag("--rates", "open loop: request rates, in requests/s on average", ANY_TEXT, "LEVELS"),
            Flag("--concurrencies", "closed loop: numbers of requests in flight", ANY_TEXT, "LEVELS"),
        ],
    )
    add_flags(group, _LEVEL_FLAGS)
    add_trace_arguments(parser)
    add_synthetic_arguments(parser)
    add_run_arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Runs all load levels; returns the exit status."""
    axis: Axis = "rate" if options.rates is not None else "concurrency"
    text, flag = (options.rates, "--rates") if axis == "rate" else (options.concurrencies, "--concurrencies")
    loads = ladder(text, flag, whole=axis == "concurrency")
    limits = measure_options(options).slo
    if options.bisect and not limits:
        raise OptionError("--bisect needs limits to look for, as --slo ttft:500 tpot:50")
    at = _workloads(options, axis, loads)
    check_run_flags(options)
    first = describe(at(loads[0]))
    listed = ", ".join(f"{load:g}" for load in loads)
    print(f"{len(loads)} load level{'s' * (len(loads) > 1)}: {listed} {UNITS[axis]}; the first runs")
    print(first)
    if options.dry_run:
        return 0
    with result_folder(options.result_dir, "sweep") as folder:
        return _climb(options, axis, loads, at, folder)


def _climb(
    options: argparse.Namespace, axis: Axis, loads: tuple[float, ...], at: Callable[[float], Trace], folder: Path
) -> int:
    """Runs the sweep into a folder; returns the exit status."""
    limits = measure_options(options).slo
    result = sweep(
        loads,
        lambda load: _run_once(options, axis, load, at(load), folder),
        axis=axis,
        targets=TARGETS if limits else (),
        bisect=options.bisect,
        precision=options.precision,
        max_probes=options.probes,
        retries=options.retries,
        keep_going=options.keep_going,
    )
    about = {"target": without_credentials(options.target), "command": shlex.join(options.command_line)}
    write_sweep(result, limits, folder, about=about)
    console = Console()
    for line in sweep_lines(result, limits):
        console.print(line, soft_wrap=True)
    console.print(f"Results: {folder}, pictures and table in {PAGE}", soft_wrap=True, markup=False)
    return _exit_status(result, options)


def _run_once(options: argparse.Namespace, axis: Axis, load: float, requests: Trace, folder: Path) -> LoadLevel:
    name, take = f"{axis}-{load:g}", 1
    while (folder / name).exists():
        name, take = f"{axis}-{load:g}-take-{take + 1}", take + 1
    print(f"{load:g} {UNITS[axis]}{', again' if take > 1 else ''}", flush=True)
    chosen = argparse.Namespace(**{**vars(options), "concurrency": int(load) if axis == "concurrency" else None})
    salt = None if options.prompt_salt is None else f"{options.prompt_salt}-{name}"  # never the same in two runs
    with part_of_results(folder / name) as own:
        outcome = run_and_report(requests, chosen, own, salt=salt)
    return load_level_of(load, outcome.run, outcome.metrics, outcome.verdict, name)


def _workloads(options: argparse.Namespace, axis: Axis, loads: tuple[float, ...]) -> Callable[[float], Trace]:
    """Returns what is run at a load.

    Raises: OptionError: flags set the rate beside --rates, or there are too few requests for the duration.
    """
    for name in ("rate", "speed", "request_rate", "rate_steps", "ramp_up_strategy"):
        if axis == "rate" and getattr(options, name) is not None:
            raise OptionError(f"--rates sets the rate of every load level; leave --{name.replace('_', '-')} out")
    lasts_s: float | None = options.level_duration
    if axis == "concurrency":
        if options.max_concurrency is not None:
            raise OptionError("--concurrencies is a closed loop; leave --max-concurrency out")
        if lasts_s is not None:
            raise OptionError(
                "--level-duration is for --rates; a closed loop lasts as long as its requests, --num-prompts"
            )
        requests = workload(options)
        return lambda _load: requests
    if options.trace is None:
        if lasts_s is not None and options.num_prompts is not None:
            raise OptionError("--level-duration and --num-prompts both say how many requests; give one of them")
        needed = math.ceil(loads[-1] * (lasts_s or 0.0))
        if needed > MAX_REQUESTS:
            raise OptionError(
                f"--level-duration {lasts_s:g}: {loads[-1]:g} requests/s need {needed} requests, {MAX_REQUESTS} at most"
            )
        return lambda load: _drawn(options, load)
    trace = workload(options)
    needed = math.ceil(loads[-1] * (lasts_s or 0.0))
    if needed > len(trace):
        raise OptionError(
            f"--level-duration {lasts_s:g}: {loads[-1]:g} requests/s need {needed} requests, the trace has {len(trace)}"
        )
    if lasts_s is None:
        return lambda load: at_rate(trace, load)
    # Not the first minutes of the whole trace at this rate: what it sends in them may be far from its mean.
    return lambda load: at_rate(limit(trace, max(2, math.ceil(load * lasts_s))), load)


def _drawn(options: argparse.Namespace, load: float) -> Trace:
    """A synthetic workload whose schedule has exactly this mean rate: a draw is off by a few percent, with few requests
    by more than load levels are apart.
    """
    chosen = {**vars(options), "request_rate": load}
    if options.level_duration is not None:
        chosen["num_prompts"] = max(2, math.ceil(load * options.level_duration))
    drawn = workload(argparse.Namespace(**chosen))
    return with_arrivals(drawn, at_rate(drawn, load).arrival_s)


def _exit_status(result: Sweep, options: argparse.Namespace) -> int:
    if result.failure:
        print(f"chairlift-loadgen sweep: error: {result.failure}", file=sys.stderr)
        return ExitStatus.INTERRUPTED if result.interrupted else ExitStatus.FAILED
    is_invalid = any(load_level.level == "INVALID" for load_level in settled(result.load_levels))
    return ExitStatus.INVALID if options.strict and is_invalid else 0
