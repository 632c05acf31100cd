"""A pair that schedules by latency, with a step log, for the experiments of this package."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chairlift.bench.shapes import SHAPES, write_shape
from loadgen.experiments.pair import Pair
from loadgen.simulation.step_log import StepLog, read_step_log

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What the engine and its twin have in common.

    Attributes:
        shape: of the model, with random weights in fp32.
        max_num_seqs, max_num_batched_tokens, max_model_len: flags of the engine.
        threads: of the engine.
    """

    shape: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    threads: int

    @property
    def kv_cache_tokens(self) -> int:
        """Capacity of the KV cache: enough for the longest requests in all slots, so that it is never short."""
        return self.max_num_seqs * self.max_model_len

    def flags(self, folder: Path) -> list[str]:
        """Returns the engine's command line; writes the model's shape into the folder."""
        shape = SHAPES[self.shape]
        token_bytes = shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 2 * 4
        return [
            *("--model", str(write_shape(self.shape, folder)), "--load-format", "dummy"),
            *("--max-num-seqs", str(self.max_num_seqs), "--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--max-model-len", str(self.max_model_len), "--block-size", str(BLOCK_TOKENS)),
            *("--kv-cache-memory-bytes", str(self.kv_cache_tokens * token_bytes)),
            *("--threads", str(self.threads), "--no-enable-prefix-caching"),
        ]


class ServedPair:
    """A running pair.

    Attributes:
        address: gRPC endpoint of the frontend, HOST:PORT.
    """

    def __init__(self, address: str, step_log: Path) -> None:
        self.address = address
        self._step_log = step_log
        self._seen = StepLog((), 0)

    def new_steps(self) -> StepLog:
        """Returns the steps since the last call; call it while the engine is idle.

        Raises: TraceError: the log cannot be read.
        """
        seen, self._seen = self._seen, read_step_log(self._step_log)
        return StepLog(self._seen.steps[len(seen.steps) :], self._seen.num_left_out - seen.num_left_out)


@contextmanager
def served(
    limits: EngineLimits, folder: Path, *, policy: str = "slo", frontend_flags: Sequence[str] = ()
) -> Iterator[ServedPair]:
    """Starts a pair under a scheduling policy, and stops it. Raises TargetError as `Pair`."""
    folder.mkdir(parents=True, exist_ok=True)
    step_log = folder / "steps.jsonl"
    flags = [*limits.flags(folder), "--scheduling-policy", policy, "--step-log", str(step_log)]
    with Pair(flags, folder, frontend_flags=frontend_flags) as pair:
        pair.wait_until_served()
        yield ServedPair(pair.address, step_log)


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns a percentile; NaN without values."""
    return float(np.percentile(values, percent)) if len(values) else float("nan")
