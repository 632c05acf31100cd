"""`python -m kernels.bench`: checks and times the Triton kernels, prints a table and keeps the raw samples.

First the ceilings (a copy, large matrix products), then attention, the sampler, linear layers and the rest, each beside
its floor: the bytes it must move and the operations it must do at those rates. What does not fit into `--budget` is
left out, and said so. Exit status: 0 when all was right; 1 when a kernel was wrong or failed, or there is no GPU; 2 for
a wrong flag.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernels.bench.dims import MODELS
from kernels.bench.figure import markdown_table, text_table
from kernels.bench.journal import Journal

_BUDGET_S = 400.0
_REHEARSED_MODEL = "tiny"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    if options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # must be there when Triton is imported
    from kernels.bench.run import GROUPS, Plan, run

    unknown = [group for group in options.only if group not in GROUPS]
    if unknown:
        print(f"kernels.bench: error: --only {unknown[0]}: must be of {', '.join(GROUPS)}", file=sys.stderr)
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
        print("a rehearsal: the figures mean nothing")
    if options.out is not None:
        options.out.write_text(json.dumps(_report(journal, about, options)) + "\n")
        print(f"raw samples: {options.out}")
    return 1 if journal.problems else 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal, interpreted")
    parser.add_argument("--model", choices=sorted(MODELS), help="whose shapes (default: llama-3.1-8b; tiny on a CPU)")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], metavar="GROUP,..", help="default: every group"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it works, measures nothing")
    parser.add_argument("--budget", type=float, default=_BUDGET_S, metavar="S", help="seconds (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (default: 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON with every sample, the machine and the command")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="figures as they come, one JSON line each")
    options = parser.parse_args(argv)
    options.arguments = list(argv)
    return options


def _show(journal: Journal, options: argparse.Namespace) -> None:
    """The table last, and after it what it lacks."""
    if journal.figures:
        print(text_table(journal.figures))
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.with_suffix(".md").write_text(markdown_table(journal.figures) + "\n")
    for line in journal.left_out:
        print(f"left out, the budget of {options.budget:g} s is spent: {line}")
    for line in journal.problems:
        print(f"kernels.bench: error: {line}", file=sys.stderr)


def _report(journal: Journal, about: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": _revision(),
        "command": ["python", "-m", "kernels.bench", *options.arguments],
        "device": about,
        "figures": [figure.as_json() for figure in journal.figures],
        "left_out": journal.left_out,
        "problems": journal.problems,
        "raw": journal.raw,
    }


def _revision() -> str:
    """The commit of the sources; "" outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return ""
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
