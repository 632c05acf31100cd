"""Pair and load generator as processes, which the engine may not import."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.floor import Length

_LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class LoadResult:
    """`result.json` of a run. Latencies count from a request's scheduled time and cover the window after the warm-up.

    Attributes:
        document: the whole file.
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
        """Length of the measured window."""
        window = self.document["window"]
        return float(window["end_s"] - window["start_s"])

    @property
    def requests_per_s(self) -> float:
        """Completed requests per second in the window."""
        return float(self.document["throughput"]["requests_per_s"])

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens per second in the window."""
        return float(self.document["throughput"]["output_tokens_per_s"])

    @property
    def mean_in_flight(self) -> float:
        """Mean number of requests in flight in the window."""
        return float(self.document["throughput"]["mean_in_flight"])

    @property
    def attainment(self) -> float:
        """Share of requests that met every target."""
        return float(self.document["slo"]["attainment"])

    def latency_ms(self, metric: str, percentile: str) -> float:
        """Latency in milliseconds, such as ("ttft", "p99")."""
        return float(self.document["metrics"][f"{metric}_ms"][percentile])


@contextmanager
def served_pair(engine_flags: Sequence[str], folder: Path) -> Iterator[str]:
    """Starts a pair by `loadgen.experiments.pair` and yields its gRPC endpoint, HOST:PORT.

    Args:
        engine_flags: command line of the engine.
        folder: for logs and the socket; its path must be short.
    Raises: BenchmarkError: it does not start; with its last lines.
    """
    command = [sys.executable, "-m", "loadgen.experiments.pair", str(folder)]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, "--", *engine_flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            if not (address := process.stdout.readline().strip()):
                errors.seek(0)
                raise BenchmarkError(errors.read().strip() or "the pair ended without a message")
            yield address
        finally:
            process.communicate()  # closes stdin, which stops the pair


def run_load(
    target: str, lengths: Sequence[Length], folder: Path, flags: Sequence[str], *, timeout_s: float
) -> LoadResult:
    """Runs `loadgen run` on requests of these lengths, each with its own prompt.

    Args:
        target: URL of the server.
        lengths: of the requests, in order.
        folder: for the records; must not exist.
        flags: loop, rate, targets.
        timeout_s: time limit.
    Raises: BenchmarkError: it failed or was too slow; with its last lines.
    """
    data = folder.with_suffix(".jsonl")
    lines = [json.dumps({"input_tokens": length.prompt, "output_tokens": length.output}) for length in lengths]
    data.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "loadgen", "run", "--target", target, "--dataset", "jsonl"]
    command += ["--dataset-path", str(data), "--result-dir", str(folder), *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"the load generator has not ended after {timeout_s:.0f} s") from error
    if done.returncode != 0:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-_LOG_LINES:])
        raise BenchmarkError(f"the load generator ended with status {done.returncode}:\n{last}")
    return LoadResult(json.loads((folder / "result.json").read_text()))
