"""Checks everything on a machine with a GPU, stage by stage: `make gpu-check STAGE=...`.

Claim: the figures for a GPU in docs/performance.md were measured by these commands.

Method: a stage runs tests or a benchmark in separate processes, within the time left of `--budget`. A
process that exceeds it is stopped, and its results so far count; the next process runs also if one has failed. Every
figure is shown beside its goal and its floor, from rates of the same run. The stage prints a table and writes it in
Markdown (gpu-STAGE-TIME.md in `--out`, updated after every process), with a JSON file of every sample, the GPU, the
versions, the commit and the command. Measurements that did not fit are listed as left out. Exit status 1 if something
could not run.

`--first-contact` is for the first ten minutes on a machine: versions, tests, whole models in bf16 judged
by `transformers` (eager, with graphs, with two steps in flight, each request alone), and the decode step of 64
requests.

It needs no network and installs nothing: plain `python3` with `PYTHONPATH=.:protos` and torch, triton, numpy,
transformers, grpcio, protobuf, pytest and pytest-timeout. Servers (stage pair) also need grpcio-health-checking,
grpcio-reflection, grpcio-status, googleapis-common-protos, prometheus-client, jinja2 and tokenizers: put the wheels of
what is not installed into a folder and set CHAIRLIFT_WHEELS to it; every process of the check then finds them. To
rehearse a stage on a CPU: `--device cpu --shape tiny --quick`.
"""

import argparse
import importlib.util
import os
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import torch

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import markdown_table
from engine.bench.gpu.setting import STAGE_BUDGET_S
from engine.bench.gpu.stage import outcome_of
from engine.bench.gpu.stages import FIRST_CONTACT, STAGES, Command, Rehearsal, commands_of
from engine.bench.shapes import model_names
from kernels.bench.budget import Budget
from kernels.bench.journal import Journal

_LEAST_S = 20.0  # no command is started with less time left
_STOP_S = 10.0
_LOG_LINES = 25
_SHOW_S = 0.2


def run(settings: Settings) -> Outcome:
    """Runs a stage, or lists the stages."""
    options = settings.options
    if options.device == "cuda" and options.stage is not None and not torch.cuda.is_available():
        raise BenchmarkError("PyTorch sees no GPU here; use --device cpu --quick to rehearse the stage without one")
    if options.stage is None:
        lines = [f"  make gpu-check STAGE={name:10}{text}" for name, text in STAGES.items()]
        lines.append("  make gpu-check ARGS=--first-contact: a little of everything, for a new machine")
        return Outcome((), {}, "\n".join(lines), table="stages:")
    budget, journal = Budget(options.budget), Journal()
    said: list[str] = []
    rehearsal = Rehearsal(options.device, options.shape, settings.quick, settings.threads)
    num_processes = max(8, (os.cpu_count() or 1) - 2) if importlib.util.find_spec("xdist") is not None else 1
    seed = secrets.randbelow(1 << 24)
    options.out.mkdir(parents=True, exist_ok=True)
    table = options.out / f"gpu-{options.stage}-{datetime.now(UTC):%Y%m%d-%H%M%S}.md"
    for command in commands_of(options.stage, rehearsal, options.extra, num_processes=num_processes, seed=seed):
        said += _run(command, settings, budget, journal)
        _write_markdown(table, journal, said)
    print(f"table: {table}")
    outcome = outcome_of(journal)
    return replace(outcome, text="\n".join([*said, *outcome.text.splitlines()]))


def _run(command: Command, settings: Settings, budget: Budget, journal: Journal) -> list[str]:
    """Runs one command within its time limit, adds its results to the journal and returns lines to print."""
    if not budget.allows(_LEAST_S):
        journal.leave_out(command.title)
        return []
    seconds = command.share * budget.left_s
    own = settings.scratch / f"{len(list(settings.scratch.iterdir()))}.jsonl"
    arguments = command.full_arguments(own, seconds)
    settings.progress(f"{command.title}: python {shlex.join(arguments)}")
    log = own.with_suffix(".log")
    status = _status(arguments, dict(command.environ), log, seconds)
    num_problems = len(journal.problems)
    journal.absorb(own)
    last = log.read_text(errors="replace").splitlines()
    journal.keep({f"log of {command.title}": last[-_LOG_LINES:], f"command of {command.title}": arguments})
    if status is None:
        journal.fail(f"{command.title}: stopped at its limit of {seconds:.0f} s")
    elif status and len(journal.problems) == num_problems:
        text = "\n".join(last[-_LOG_LINES:])
        journal.fail(f"{command.title}: failed with exit status {status}:\n{text}")
    return [] if command.reports or not last else [f"{command.title}: {last[-1]}"]


def _status(arguments: list[str], changes: dict[str, str], log: Path, seconds: float) -> int | None:
    """Runs Python; returns the exit status, or None if the process group was stopped at the time limit."""
    environ = {**os.environ, **changes}
    for name in (name for name, value in changes.items() if not value):
        del environ[name]
    with log.open("w") as out, log.open() as lines:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=environ, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return _wait(process, lines, seconds)
        except subprocess.TimeoutExpired:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # pytest then reports
                os.killpg(process.pid, number)
                try:
                    process.wait(_STOP_S)
                    break
                except subprocess.TimeoutExpired:
                    continue
            return None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise


def _wait(process: subprocess.Popen[bytes], lines: TextIO, seconds: float) -> int:
    """Shows what a process writes until it ends; returns its exit status.

    Raises: subprocess.TimeoutExpired: the time is over.
    """
    budget = Budget(seconds)
    status = None
    while status is None:
        try:
            status = process.wait(min(_SHOW_S, budget.left_s))
        except subprocess.TimeoutExpired:
            if not budget.left_s:
                raise
        print(lines.read(), end="", file=sys.stderr, flush=True)
    return status


def _write_markdown(path: Path, journal: Journal, said: Sequence[str]) -> None:
    lines = [markdown_table(journal.results), "", *(f"- {line}" for line in said)]
    lines += [f"- Left out, --budget was used up: {line}" for line in journal.left_out]
    lines += [f"- Could not run: {line.splitlines()[0]}" for line in journal.problems]
    path.write_text("\n".join(lines).rstrip() + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    stages = parser.add_mutually_exclusive_group()
    stages.add_argument("--stage", choices=tuple(STAGES), help="stage to run; without it the stages are listed")
    stages.add_argument(
        "--first-contact",
        dest="stage",
        action="store_const",
        const=FIRST_CONTACT,
        help="instead of a stage: a little of everything, for a new machine",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: test the stage, with --quick (default: cuda)"
    )
    parser.add_argument("--shape", choices=model_names(), help="model shape (default: llama-3.1-8b; tiny on a CPU)")
    parser.add_argument(
        "--budget",
        type=float,
        default=STAGE_BUDGET_S,
        metavar="S",
        help="wall-clock limit in seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--extra",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="flags for the benchmark of the stage, in one argument: --extra='--precision fp8 --cases 1000/1000'",
    )
