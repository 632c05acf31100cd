"""`ab`: two servers in turn, the same requests to both, and a comparison of all pairs of runs."""

import argparse
import asyncio
import secrets
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from chairlift.service.flag_kinds import ANY_TEXT, integer, switch
from chairlift.service.flags import Flag, FlagParser
from loadgen.cli.flags import ExitStatus, add_flags
from loadgen.cli.result_folder import part_of_results, result_folder
from loadgen.cli.run_options import (
    CONCURRENCY_FLAG,
    Outcome,
    add_run_arguments,
    check_run_flags,
    measure_options,
    run_and_report,
    target_spec,
)
from loadgen.cli.synthetic_options import asked_rate
from loadgen.cli.values import FILE
from loadgen.cli.workload_options import add_synthetic_arguments, add_trace_arguments, workload
from loadgen.cli.workload_text import describe
from loadgen.comparison import servers
from loadgen.comparison.ab import AbRuns, Turn, ab, turns
from loadgen.comparison.compare import Side, compare
from loadgen.errors import ComparisonError, OptionError, TargetError
from loadgen.prompts.token_ids import Vocabulary
from loadgen.report.comparison_files import PAGE, write_comparison
from loadgen.report.comparison_text import comparison_lines
from loadgen.target.base import TargetSpec
from loadgen.target.open import probe_target
from loadgen.trace.schema import Trace


class _System(NamedTuple):
    label: str
    url: str
    server: servers.ServerSpec | None


_SERVER_FLAGS = (
    Flag("--target-a", "URL of server A, see --target of `run`", ANY_TEXT, "URL"),
    Flag("--target-b", "URL of server B", ANY_TEXT, "URL"),
    Flag("--label-a", "label of A in the report (default: a)", ANY_TEXT, "TEXT"),
    Flag("--label-b", "label of B in the report (default: b)", ANY_TEXT, "TEXT"),
    Flag("--servers", "TOML file with the commands that start both servers, see below", FILE),
    Flag("--repeats", "pairs of runs (default: 5)", integer(1), default=5),
    Flag("--force", "compare even if a run is INVALID; the report notes it", switch()),
)


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Runs A B, B A, A B, ... with the same requests, and compares them request by request. Servers\n"
        "that are there already get fresh prompts in every run. Those that are started for each run, and stopped\n"
        "then, get the same prompts within a pair.",
        epilog=f"--servers FILE. {servers.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser.add_argument_group("servers"), _SERVER_FLAGS)
    add_trace_arguments(parser)
    add_synthetic_arguments(parser)
    add_flags(parser, [CONCURRENCY_FLAG])
    add_run_arguments(parser, with_target=False)
    return parser


def run(options: argparse.Namespace) -> int:
    """Runs and compares; returns the exit status."""
    systems = _systems(options)
    requests = workload(options)
    specs = [target_spec(options, system.url) for system in systems]
    check_run_flags(options)
    print(describe(requests, asked_rate(options)))
    print(f"{options.repeats} pairs of runs: {systems[0].label} is A, {systems[1].label} is B, in turn A B B A ...")
    if options.servers is None:
        print("every run gets prompts of its own: one server may have both addresses, and would know those of a pair")
    if options.dry_run:
        return 0
    with result_folder(options.result_dir, "ab") as folder:
        return _run_all(options, systems, specs, requests, folder)


def _run_all(
    options: argparse.Namespace,
    systems: tuple[_System, _System],
    specs: list[TargetSpec],
    requests: Trace,
    folder: Path,
) -> int:
    """Runs all turns into a folder and compares them; returns the exit status."""
    vocabulary = _vocabulary(options, systems, specs, folder)

    def run_once(turn: Turn) -> Outcome:
        system, name = systems[turn.side], f"{'ab'[turn.side]}-{turn.pair + 1}"
        print(f"pair {turn.pair + 1} of {options.repeats}: {system.label}, {system.url}", flush=True)
        with part_of_results(folder / name) as own, _running(system, folder / f"{name}-server.log"):
            return run_and_report(requests, options, own, spec=specs[turn.side], salt=turn.salt, vocabulary=vocabulary)

    order = turns(options.repeats, lambda: _salt(options), may_be_one_server=options.servers is None)
    ab_runs = ab(order, run_once, (systems[0].label, systems[1].label))
    return _report(options, systems, ab_runs, folder)


def _running(system: _System, log: Path) -> AbstractContextManager[None]:
    """Starts and stops the server if it is ours to start."""
    return nullcontext() if system.server is None else servers.running(system.server, log)


def _vocabulary(
    options: argparse.Namespace, systems: tuple[_System, _System], specs: list[TargetSpec], folder: Path
) -> Vocabulary | None:
    """Asks both servers for their vocabulary; returns what they have in common, None where a prompt is text.

    Without it, sides of which one does not state its vocabulary, as most servers over HTTP, would get other prompts.
    """
    if any(spec.prompt_mode == "text" for spec in specs):
        return None
    facts = []
    for side, system, spec in zip("ab", systems, specs, strict=True):
        with _running(system, folder / f"{side}-probe-server.log"):
            facts.append(asyncio.run(probe_target(spec)))
    special_ids = facts[0].special_ids | facts[1].special_ids
    if options.vocab_size is not None:
        return Vocabulary.of(options.vocab_size, special_ids)
    return Vocabulary.common([one.vocab_size for one in facts], special_ids)


def _report(
    options: argparse.Namespace, systems: tuple[_System, _System], ab_runs: AbRuns[Outcome], folder: Path
) -> int:
    if not ab_runs.pairs:
        there = f", what was run is in {folder}" if any(folder.glob("*/*")) else ""
        text = f"{ab_runs.failure}; nothing to compare{there}"
        if not ab_runs.interrupted:
            raise TargetError(text)
        print(f"chairlift-loadgen ab: error: {text}", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    outcomes = list(zip(*ab_runs.pairs, strict=True))
    sides = [
        Side(system.label, tuple(one.run for one in several), tuple(one.verdict for one in several))
        for system, several in zip(systems, outcomes, strict=True)
    ]
    try:
        comparison = compare(sides, measure_options(options), force=options.force)
    except ComparisonError as error:
        aborted = f"{ab_runs.failure}; " if ab_runs.failure else ""
        raise ComparisonError(f"{aborted}{error}; the runs are in {folder}{_valid_pairs(ab_runs, sides)}") from error
    about = {"command": shlex.join(options.command_line)}
    if ab_runs.failure:
        about["aborted"] = ab_runs.failure
    write_comparison(comparison, sides, folder, about=about)
    console = Console()
    for line in comparison_lines(comparison):
        console.print(line, soft_wrap=True)
    console.print(f"Results: {folder}, picture and table in {PAGE}", soft_wrap=True, markup=False)
    if ab_runs.failure:
        whole = f"{len(ab_runs.pairs)} of {options.repeats} pairs are whole and compared"
        print(f"chairlift-loadgen ab: error: {ab_runs.failure}; {whole}", file=sys.stderr)
        return ExitStatus.INTERRUPTED if ab_runs.interrupted else ExitStatus.FAILED
    invalid = any(verdict.level == "INVALID" for side in sides for verdict in side.verdicts)
    return ExitStatus.INVALID if options.strict and invalid else 0


def _valid_pairs(ab_runs: AbRuns[Outcome], sides: list[Side]) -> str:
    """How to compare the pairs in which no run is INVALID; "" if there are none, or nothing else."""
    valid = [pair for pair in ab_runs.pairs if all(one.verdict.level != "INVALID" for one in pair)]
    if not valid or len(valid) == len(ab_runs.pairs):
        return ""
    runs = [f"{side.label}={one.folder}" for pair in valid for side, one in zip(sides, pair, strict=True)]
    return f"; those of valid pairs: chairlift-loadgen compare {shlex.join(runs)}"


def _systems(options: argparse.Namespace) -> tuple[_System, _System]:
    targets = (options.target_a, options.target_b)
    if options.servers is not None:
        if any(targets):
            raise OptionError("--servers names the targets itself; leave --target-a and --target-b out")
        started: tuple[servers.ServerSpec, servers.ServerSpec] | tuple[None, None] = servers.read_servers(
            options.servers
        )
        urls = tuple(server.target for server in started if server is not None)
    elif not all(targets):
        raise OptionError("ab needs --target-a and --target-b, or --servers")
    else:
        started, urls = (None, None), targets
    first, second = (
        _System(given or (name if server is None else server.label), url, server)
        for given, name, url, server in zip((options.label_a, options.label_b), "ab", urls, started, strict=True)
    )
    if first.label == second.label:
        raise OptionError(f"both sides are called {first.label!r}: give them different labels")
    return first, second


def _salt(options: argparse.Namespace) -> str:
    """A fresh one; begins with `--prompt-salt` if that is given."""
    return f"{options.prompt_salt or ''}{secrets.token_hex(8)}"
