"""Checks and times the Triton kernels, prints a table and writes the raw samples.

Measures the ceilings of the device first (a copy, large matrix products), then attention, the sampler, linear layers
and the rest. Each figure is shown beside its floor: the time for its bytes and operations at those ceilings. Cases that
do not fit into --budget are listed as left out. Exit status: 0 if every kernel was correct; 1 if a kernel was wrong or
failed, or there is no GPU; 2 for a wrong flag.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chairlift.bench.report import format_table, git_revision, markdown_table
from kernels.bench.dims import MODELS
from kernels.bench.journal import Journal

_BUDGET_S = 400.0
_REHEARSED_MODEL = "tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # must be set before Triton is imported
    from kernels.bench.run import GROUPS, Plan, run

    unknown = [group for group in options.only if group not in GROUPS]
    if unknown:
        print(f"kernels.bench: error: --only {unknown[0]}: must be one of {', '.join(GROUPS)}", file=sys.stderr)
        return 2
    journal = Journal(options.journal)
    plan = Plan(
        device=options.device,
        model=options.model or (_REHEARSED_MODEL if options.device == "cpu" else "llama-3.1-8b"),
        groups=options.only or tuple(GROUPS),
        quick=options.quick or options.device == "cpu",
        budget_s=options.budget,
        seed=options.seed,
    )
    about: dict[str, Any] = {}
    try:
        about = run(plan, journal, lambda text: print(text, file=sys.stderr, flush=True))
    except (RuntimeError, ValueError) as error:
        journal.fail(str(error))
    _show(journal, options)
    if plan.quick:
        print("quick sizes or a CPU: the figures are meaningless")
    if options.out is not None:
        options.out.write_text(json.dumps(_report(journal, about, options)) + "\n")
        print(f"raw samples: {options.out}")
    return 1 if journal.problems else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: run under Triton's interpreter, to test the benchmark; its figures are meaningless (default: cuda)",
    )
    parser.add_argument(
        "--model", choices=sorted(MODELS), help="model whose shapes are used (default: llama-3.1-8b; tiny on a CPU)"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="GROUP,..",
        help="groups of kernels to run (default: all)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="use tiny sizes, to test the benchmark; its figures are meaningless"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=_BUDGET_S,
        metavar="S",
        help="wall-clock limit in seconds (default: %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed of the inputs (default: 0)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write a JSON report: every sample, the machine, the command"
    )
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="append results as they are measured, one JSON object per line"
    )
    options = parser.parse_args(argv)
    options.arguments = list(argv)
    return options


def _show(journal: Journal, options: argparse.Namespace) -> None:
    """Prints the table, then what was left out and the problems."""
    if journal.results:
        print(format_table(journal.results))
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.with_suffix(".md").write_text(markdown_table(journal.results) + "\n")
    for line in journal.left_out:
        print(f"left out, --budget {options.budget:g} s was used up: {line}")
    for line in journal.problems:
        print(f"kernels.bench: error: {line}", file=sys.stderr)


def _report(journal: Journal, about: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": git_revision(),
        "command": ["python", "-m", "kernels.bench", *options.arguments],
        "device": about,
        "results": [result.as_json() for result in journal.results],
        "left_out": journal.left_out,
        "problems": journal.problems,
        "raw": journal.raw,
    }


if __name__ == "__main__":
    sys.exit(main())
