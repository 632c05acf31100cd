"""`python -m loadgen.experiments.batching`: starts engines, measures static and continuous batching, writes a page.

Exit status: 0 when it ran, whatever came out; 2 with one line when it could not; 130 after Ctrl-C.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chairlift.bench.benchmark import BenchmarkError
from chairlift.service.flag_kinds import integer, repeated, switch
from chairlift.service.flags import Flag, FlagParser
from loadgen.cli.flags import add_flags
from loadgen.cli.values import FILE, FOLDER, POSITIVE, WINDOW
from loadgen.errors import LoadgenError, OptionError
from loadgen.experiments.batching.cases import (
    QUICK,
    Case,
    Sizes,
    paced_case,
    queued_case,
    synthetic_cases,
    trace_window,
)
from loadgen.experiments.batching.experiment import SweepPoint, Systems, running_systems, sweep
from loadgen.experiments.batching.model import Model, chosen_model
from loadgen.experiments.batching.policies import CONTINUOUS, ENGINE_FLAGS
from loadgen.experiments.batching.report import Report, case_text, sweep_text, write_report
from loadgen.experiments.batching.results import CaseResult
from loadgen.experiments.batching.system import EngineSize, RunTrace, run_trace
from loadgen.host import describe_host

_TRACE_MODEL_LEN = 2048
_BUSY = 1.0  # load average above which a run says that the machine was not its own


def main(argv: Sequence[str] | None = None, run_trace: RunTrace = run_trace) -> int:
    """Runs the command line; returns the exit status."""
    options = _parse(argv)
    try:
        _run(options, run_trace)
    except (BenchmarkError, LoadgenError) as error:
        print(f"loadgen.experiments.batching: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("loadgen.experiments.batching: interrupted", file=sys.stderr)
        return 130
    return 0


def _run(options: argparse.Namespace, run_trace: RunTrace) -> None:
    started_s = time.monotonic()
    folder = _result_folder(options.out)
    settings: dict[str, Any] = {
        "command": sys.argv,
        "host": describe_host(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": options.rounds,
    }
    warnings = _first_warnings(options)
    with tempfile.TemporaryDirectory(prefix="chairlift-batching-") as scratch:
        model = chosen_model(options.model, Path(scratch))
        sizes = (QUICK if options.quick else Sizes()).within(model.max_model_len)
        sizes = replace(sizes, sweep_slots=tuple(options.sweep_slots or sizes.sweep_slots))
        results, points = _run_all(options, model, sizes, Path(scratch), run_trace, started_s)
    for result in [*results, *(point.result for point in points)]:
        if result.case.is_queued and not result.agrees_with_simulation:
            warnings.append(f"{result.case.key}: the steps are not those of the slots alone; see its table.")
    about = (
        f"{model.title}; {sizes.num_slots} slots, prompts of {sizes.prompt_tokens} tokens that share the first "
        f"{sizes.shared_tokens}; best of {options.rounds} rounds, systems in turn; the whole pair over gRPC, with "
        f"the load generator on the same {settings['host']['usable_cpus']} cores; all in {_passed(started_s)}."
    )
    write_report(Report(about, warnings, results, points, settings), folder)
    for warning in warnings:
        print(f"! {warning}")
    print(f"{about}\nreport: {folder / 'report.html'}\nraw samples: {folder / 'samples.json'}")


def _run_all(
    options: argparse.Namespace, model: Model, sizes: Sizes, scratch: Path, run_trace: RunTrace, started_s: float
) -> tuple[list[CaseResult], list[SweepPoint]]:
    """Every case, each printed as soon as it is done, and the sweep."""

    def progress(text: str) -> None:
        print(f"  {time.monotonic() - started_s:6.0f} s  {text}", file=sys.stderr, flush=True)

    results: list[CaseResult] = []

    def run_case(running: Systems, case: Case) -> CaseResult:
        results.append(running.run_trace(case))
        print(case_text(results[-1]), end="\n\n", flush=True)
        return results[-1]

    longest = max(sizes.prompt_tokens + sizes.longest_answer, _TRACE_MODEL_LEN if options.trace else 0)
    size = EngineSize.of(model, sizes.num_slots, sizes.prompt_tokens, longest)
    progress(f"starting {', '.join(ENGINE_FLAGS)}: {model.title}, {sizes.num_slots} slots")
    with running_systems(
        size, tuple(ENGINE_FLAGS), scratch, run_trace, rounds=options.rounds, progress=progress
    ) as running:
        for case in synthetic_cases(sizes):
            running.check_ids(case)
            run_case(running, case)
        if options.trace is None:
            print("== trace: skipped, as no --trace FILE was given\n", flush=True)
        else:
            trace, title = trace_window(
                options.trace,
                window_s=options.window,
                most=sizes.trace_requests,
                scale=options.length_scale,
                max_model_len=size.max_model_len,
            )
            case = queued_case(trace, title)
            running.check_ids(case)
            capacity = len(trace) / run_case(running, case).best(CONTINUOUS).seconds
            run_case(running, paced_case(trace, title, options.load * capacity))
    points = sweep(model, sizes, scratch / "sweep", run_trace, rounds=options.rounds, progress=progress)
    print(sweep_text(points), end="\n\n", flush=True)
    return results, points


def _passed(since_s: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - since_s), 60)
    return f"{minutes} min {seconds} s"


def _first_warnings(options: argparse.Namespace) -> list[str]:
    warnings = []
    if options.quick:
        warnings.append("--quick: sizes so small that the figures mean nothing.")
    if os.getloadavg()[0] > _BUSY:
        warnings.append(f"The machine was busy before the run began: load average {os.getloadavg()[0]:.1f}.")
    return warnings


def _result_folder(out: Path) -> Path:
    """Made before anything is measured. Raises: OptionError: it cannot be made."""
    folder = out / f"batching-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise OptionError(f"--out {out}: {error.strerror}") from error
    return folder


_FLAGS = (
    Flag("--model", "checkpoint folder (default: a 15M shape with random weights)", FOLDER),
    Flag("--trace", "production trace of the fourth case (default: skip it)", FILE),
    Flag("--window", "part of the trace (default: 600:1200)", WINDOW, default=(600.0, 1200.0)),
    Flag("--length-scale", "scale of its prompt and output lengths (default: 0.25)", POSITIVE, default=0.25),
    Flag(
        "--load",
        "arrival rate of the trace, relative to the capacity of the continuous engine (default: 0.7)",
        POSITIVE,
        "SHARE",
        0.7,
    ),
    Flag(
        "--sweep-slots",
        "slots of the engines in the sweep (default: 4 8 16 32 64 128)",
        repeated(integer(1), takes_several=True),
    ),
    Flag("--rounds", "measured rounds (default: 3)", integer(1), default=3),
    Flag("--quick", "tiny sizes, one minute: checks that it runs, measures nothing", switch()),
    Flag("--out", "folder for the results (default: bench-results)", FOLDER, default=Path("bench-results")),
)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = FlagParser(
        prog="python -m loadgen.experiments.batching",
        description="Compares static and continuous batching in the same engine: equal ids, steps against a "
        "simulation of the slots, time, latencies, and slot occupancy.",
    )
    add_flags(parser, _FLAGS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
