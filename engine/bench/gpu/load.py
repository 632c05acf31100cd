"""The load generator as a process of its own, and what it says of a run."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.floor import Length

_LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`result.json` of a run; latencies count from when a request was due and are of the window after the warm-up.

    Attributes:
        document: all of it.
    """

    document: dict[str, Any]

    @property
    def verdict(self) -> str:
        """VALID, DEGRADED or INVALID, with the reasons."""
        verdict = self.document["verdict"]
        return ": ".join([verdict["level"], *verdict["reasons"][:1]])

    @property
    def is_valid(self) -> bool:
        """Whether its figures may be quoted."""
        return bool(self.document["verdict"]["level"] != "INVALID")

    @property
    def window_s(self) -> float:
        """Length of what was measured."""
        window = self.document["window"]
        return float(window["end_s"] - window["start_s"])

    @property
    def requests_per_s(self) -> float:
        """Completed in the window."""
        return float(self.document["throughput"]["requests_per_s"])

    @property
    def output_tokens_per_s(self) -> float:
        """Delivered in the window."""
        return float(self.document["throughput"]["output_tokens_per_s"])

    @property
    def mean_in_flight(self) -> float:
        """Requests under way in the window, on average."""
        return float(self.document["throughput"]["mean_in_flight"])

    @property
    def attainment(self) -> float:
        """Share of all requests that kept every target."""
        return float(self.document["slo"]["attainment"])

    def latency_ms(self, metric: str, percentile: str) -> float:
        """Such as ("ttft", "p99")."""
        return float(self.document["metrics"][f"{metric}_ms"][percentile])


def play(
    target: str,
    lengths: Sequence[Length],
    folder: Path,
    flags: Sequence[str],
    *,
    timeout_s: float,
    python_path: Sequence[Path] = (),
) -> LoadResult:
    """Runs `loadgen run` on requests of these lengths with prompts of their own.

    Args:
        target: URL of the server.
        lengths: of the requests, in order.
        folder: for the records; must not exist.
        flags: loop, rate, targets.
        timeout_s: when to give up.
        python_path: put in front of its module path.
    Raises: BenchmarkError: it failed or was too slow; with its last lines.
    """
    data = folder.with_suffix(".jsonl")
    lines = [json.dumps({"input_tokens": length.prompt, "output_tokens": length.output}) for length in lengths]
    data.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "loadgen", "run", "--target", target, "--dataset", "jsonl"]
    command += ["--dataset-path", str(data), "--result-dir", str(folder), *flags]
    path = os.pathsep.join([*map(str, python_path), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    environ = {**os.environ, **({"PYTHONPATH": path} if path else {})}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"the load generator has not ended after {timeout_s:.0f} s") from error
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-_LOG_LINES:])
        raise BenchmarkError(f"the load generator ended with status {done.returncode}:\n{last}")
    return LoadResult(json.loads((folder / "result.json").read_text()))
