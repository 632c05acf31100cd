"""Runs the numerical tests as on other CPUs and other numbers of cores: `python -m tests.portability --help`."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.portability.intel_paths import intel_paths
from tests.portability.machines import MACHINES

ROOT = Path(__file__).parents[2]
NUMERICAL = [
    "tests/kernels",
    "tests/engine/model",
    "tests/engine/parallel",
    "tests/engine/runner",
    # for GPUs: the CPU decides nothing but how long it takes
    "--deselect=tests/kernels/gpu/test_compile.py",
    "--deselect=tests/kernels/gpu/test_launch.py",
]
MATRIX = [*((name, 2) for name in MACHINES), ("native", 1), ("haswell", 1), ("native", 4), ("skylake-avx512", 4)]
"""Names and cores. Processes get more threads than there are cores if need be."""

TOO_SLOW = {"generic": ["--deselect=tests/engine/runner/test_exactness.py"]}
"""Without FMA each fused multiply-add is a call of the C library: 20,000 tokens take over a quarter of an hour."""


class Result(NamedTuple):
    """Of one run; `summary` is pytest's last line."""

    name: str
    num_cores: int
    status: int
    summary: str
    seconds: float

    def __str__(self) -> str:
        verdict = {0: "passed", -1: "left out"}.get(self.status, "FAILED")
        return f"{self.name:16}{self.num_cores:2} cores  {verdict:9} {self.seconds:6.0f} s  {self.summary}"


def variables_of(name: str, num_cores: int) -> dict[str, str]:
    """What a process is told."""
    return MACHINES[name].variables | {"OMP_NUM_THREADS": str(num_cores), "NUMBA_NUM_THREADS": str(num_cores)}


def run(name: str, num_cores: int, variables: dict[str, str], arguments: Sequence[str]) -> Result:
    """The tests on one machine; what they print is shown if one fails."""
    if missing := MACHINES[name].missing:
        return Result(name, num_cores, -1, f"this CPU lacks {', '.join(sorted(missing))}", 0.0)
    usable = sorted(os.sched_getaffinity(0))[:num_cores]
    start_s = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *(arguments or [*NUMERICAL, *TOO_SLOW.get(name, [])]),
        ],
        cwd=ROOT,
        env={**os.environ, **variables_of(name, num_cores), **variables},
        preexec_fn=lambda: os.sched_setaffinity(0, usable),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, flush=True)
    summary = (done.stdout.strip().splitlines() or [""])[-1]
    return Result(name, num_cores, done.returncode, summary, time.monotonic() - start_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a test failed anywhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", nargs="+", choices=MACHINES, default=list(MACHINES), help="those alone")
    parser.add_argument("--cores", nargs="+", type=int, help="these numbers of cores alone, of 1, 2 and 4")
    parser.add_argument("tests", nargs="*", help="for pytest, after --; default: all that compare numbers")
    options = parser.parse_args(arguments)
    chosen = [
        (name, num_cores)
        for name, num_cores in MATRIX
        if name in options.machines and (options.cores is None or num_cores in options.cores)
    ]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        variables = intel_paths(Path(folder))
        if not variables:
            print("No C compiler here: MKL takes the paths of this CPU's maker everywhere.")
        for name, num_cores in chosen:
            results.append(run(name, num_cores, {} if name == "native" else variables, options.tests))
            print(results[-1], flush=True)
    return int(any(result.status > 0 for result in results) or not results)


if __name__ == "__main__":
    sys.exit(main())
