"""`python -m engine.bench`: runs one benchmark, prints its table and keeps its raw samples.

Exit status: 0 when it ran, whether goals are met or not; 1 when its figures would mean nothing, or some are missing; 2
for a wrong flag.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from chairlift.bench.benchmark import Benchmark, BenchmarkError, Settings, positive
from chairlift.bench.report import format_table, write_report
from engine.bench.machine import Floors, Machine, load_average, measure_floors
from engine.bench.registry import find_benchmarks
from engine.errors import CheckpointError, ConfigError
from engine.startup.machine import usable_cpus


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    benchmarks = find_benchmarks()
    options = _parse(benchmarks, argv)
    if options.name == "list":
        for benchmark in benchmarks:
            print(f"{benchmark.name:24}{', '.join(benchmark.ids):10}{benchmark.summary}")
        return 0
    benchmark = next(b for b in benchmarks if options.name in (b.name, *b.ids))
    try:
        problems = _run(benchmark, options)
    except (BenchmarkError, CheckpointError, ConfigError) as error:
        print(f"engine.bench {benchmark.name}: error: {error}", file=sys.stderr)
        return 1
    for problem in problems:
        print(f"engine.bench {benchmark.name}: error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _run(benchmark: Benchmark, options: argparse.Namespace) -> tuple[str, ...]:
    """Runs one, shows and keeps what it found -> its problems."""
    machine, load = Machine.here(), load_average()
    print(f"{machine.cpu}, {machine.usable_cpus} cores, {' '.join(machine.cpu_flags)}; load average {load:.1f}")
    try:
        floors = (
            measure_floors(options.threads, quick=options.quick)
            if benchmark.has_cpu_floors
            else Floors.unknown(options.threads)
        )
    except ValueError as error:
        raise ConfigError(f"--threads: {error}") from error
    if benchmark.has_cpu_floors:
        print(floors, flush=True)
    with tempfile.TemporaryDirectory(prefix="chairlift-bench-") as scratch:
        outcome = benchmark.run(
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
    print(format_table(outcome.results) if outcome.table is None else outcome.table)
    if outcome.text:
        print(outcome.text)
    if options.quick:
        print("--quick: the figures mean nothing")
    if outcome.raw:
        path = write_report(
            options.out,
            benchmark.name,
            results=outcome.results,
            raw=outcome.raw,
            machine={
                **asdict(machine),
                "load_average": load,
                "floors": floors.as_json() if benchmark.has_cpu_floors else None,
            },
            arguments={name: _plain(value) for name, value in sorted(vars(options).items())},
        )
        print(f"raw samples: {path}")
    return outcome.problems


def _parse(benchmarks: Sequence[Benchmark], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m engine.bench", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    commands.add_parser("list", help="all benchmarks")
    for benchmark in benchmarks:
        command = commands.add_parser(
            benchmark.name,
            aliases=benchmark.ids,
            help=benchmark.summary,
            description=sys.modules[benchmark.run.__module__].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument(
            "--rounds", type=positive, default=5, help="turns of every contestant (default: %(default)s)"
        )
        command.add_argument("--out", type=Path, default=Path("bench-results"), help="folder of the raw samples")
        command.add_argument("--threads", type=positive, default=usable_cpus(), help="default: one per core")
        command.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing")
        benchmark.add_arguments(command)
    return parser.parse_args(argv)


def _plain(value: object) -> object:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


if __name__ == "__main__":
    sys.exit(main())
