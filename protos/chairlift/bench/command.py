"""Command line of a package of benchmarks: runs one, prints its table and writes its raw samples.

Exit status: 0 if it ran, whether its goals are met or not; 1 if its figures are invalid or incomplete; 2 for a wrong
flag.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from chairlift.bench.benchmark import Benchmark, BenchmarkError, Outcome, Settings, positive
from chairlift.bench.report import format_table, write_report


def run_command(
    prog: str,
    benchmarks: Sequence[Benchmark],
    argv: Sequence[str] | None,
    *,
    machine: Mapping[str, Any],
    errors: tuple[type[Exception], ...],
    measure_floors: Callable[[int, bool], Any] | None = None,
) -> int:
    """Runs the command line; returns the exit status.

    Args:
        prog: package that is run, as after `python -m`.
        benchmarks: to choose from.
        argv: command line; None is that of the process.
        machine: description for the report, with `cpu`, `usable_cpus` and `cpu_flags`.
        errors: exceptions besides BenchmarkError that are reported in one line.
        measure_floors: measures what the CPU can do, from threads and `--quick`; its result has `as_json`.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parse(prog, benchmarks, arguments, int(machine["usable_cpus"]))
    if options.name == "list":
        for benchmark in benchmarks:
            print(f"{benchmark.name:28}{', '.join(benchmark.ids):10}{benchmark.summary}")
        return 0
    benchmark = next(b for b in benchmarks if options.name in (b.name, *b.ids))
    load = os.getloadavg()[0]
    reported: tuple[type[Exception], ...] = (BenchmarkError, *errors)
    print(f"{machine['cpu']}, {machine['usable_cpus']} CPUs, {' '.join(machine['cpu_flags'])}; load average {load:.1f}")
    try:
        floors = measure_floors(options.threads, options.quick) if measure_floors and benchmark.has_cpu_floors else None
        if floors is not None:
            print(floors, flush=True)
        outcome = _run(benchmark, options, floors)
    except reported as error:
        print(f"{prog} {benchmark.name}: error: {error}", file=sys.stderr)
        return 1
    print(format_table(outcome.results) if outcome.table is None else outcome.table)
    if outcome.text:
        print(outcome.text)
    if options.quick:
        print("--quick: the figures are meaningless")
    if outcome.raw:
        path = write_report(
            options.out,
            benchmark.name,
            results=outcome.results,
            raw=outcome.raw,
            machine={**machine, "load_average": load, "floors": None if floors is None else floors.as_json()},
            arguments={name: _plain(value) for name, value in sorted(vars(options).items())},
        )
        print(f"raw samples: {path}")
    for problem in outcome.problems:
        print(f"{prog} {benchmark.name}: error: {problem}", file=sys.stderr)
    return 1 if outcome.problems else 0


def _run(benchmark: Benchmark, options: argparse.Namespace, floors: Any) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="chairlift-bench-") as scratch:
        return benchmark.run(
            Settings(
                rounds=options.rounds,
                quick=options.quick,
                threads=options.threads,
                scratch=Path(scratch),
                floors=floors,
                progress=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
                options=options,
            )
        )


def _parse(prog: str, benchmarks: Sequence[Benchmark], argv: Sequence[str], num_cpus: int) -> argparse.Namespace:
    """Parses the command line; imports the chosen benchmark alone, for its flags."""
    parser = argparse.ArgumentParser(prog=f"python -m {prog}", description="Runs one benchmark.")
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    commands.add_parser("list", help="list all benchmarks")
    for benchmark in benchmarks:
        command = commands.add_parser(benchmark.name, aliases=benchmark.ids, help=benchmark.summary)
        if argv and argv[0] in (benchmark.name, *benchmark.ids):
            _add_arguments(command, benchmark.module(), num_cpus)
    return parser.parse_args(argv)


def _add_arguments(command: argparse.ArgumentParser, module: ModuleType, num_cpus: int) -> None:
    command.description = module.__doc__
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument(
        "--rounds", type=positive, default=5, metavar="N", help="measured rounds of every system (default: 5)"
    )
    command.add_argument(
        "--out",
        type=Path,
        default=Path("bench-results"),
        metavar="DIR",
        help="folder for the raw samples (default: bench-results)",
    )
    command.add_argument(
        "--threads",
        type=positive,
        default=num_cpus,
        metavar="N",
        help="CPU threads of every system (default: one per usable CPU)",
    )
    command.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to test the benchmark; its figures are meaningless"
    )
    if hasattr(module, "add_arguments"):
        module.add_arguments(command)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
