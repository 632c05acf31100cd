"""Assigns requests to workers, in turn and before the start. Pure."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.run.options import RunOptions
from loadgen.run.sender import Shard
from loadgen.trace.schema import Trace

TOKENS_PER_S_PER_WORKER = 3000
"""At 52 us of CPU per message a worker tops out near 19k/s; from 5k/s it sees messages late by 4 ms in p99, at 3.2k/s
by 0.8 ms (grpcio 1.85, 2-core machine)."""
_BUSY_S = 10.0
_TOKENS_PER_S_PER_SLOT = 50  # of a closed loop, whose rate is the server's to choose


class WorkerCount(NamedTuple):
    """Number of workers, and a warning if that is too few; "" otherwise."""

    num_workers: int
    warning: str


def worker_count(workload: Trace, options: RunOptions, num_cpus: int) -> WorkerCount:
    """Returns as many workers as the load needs, and at most one less than the cores.

    Args:
        workload: its busiest ten seconds set the load.
        options: `workers` overrides the number.
        num_cpus: cores that this process may use.
    """
    if options.concurrency is not None:
        tokens_per_s = float(options.concurrency * _TOKENS_PER_S_PER_SLOT)
    else:
        tokens_per_s = _busiest_tokens_per_s(workload)
    needed = max(1, math.ceil(tokens_per_s / TOKENS_PER_S_PER_WORKER))
    most = max(1, num_cpus - 1)
    num_workers = min(options.workers or min(needed, most), len(workload))
    if options.concurrency is not None:
        num_workers = min(num_workers, options.concurrency)
    if options.max_concurrency is not None:
        num_workers = min(num_workers, options.max_concurrency)
    if num_workers >= needed or num_workers == len(workload):
        return WorkerCount(num_workers, "")
    return WorkerCount(
        num_workers,
        f"up to {tokens_per_s:.0f} tokens/s need {needed} workers of {TOKENS_PER_S_PER_WORKER} tokens/s each, and "
        f"{num_workers} run ({num_cpus} cores): messages may be seen late",
    )


def make_shards(workload: Trace, options: RunOptions, num_workers: int) -> list[Shard]:
    """Returns the shard of each worker: every num_workers-th request, and an equal part of the concurrency.

    Args:
        workload: is shared out.
        options: how it is run.
        num_workers: from `worker_count`, so at most the concurrency.
    """
    due_ns = np.round(workload.arrival_s * 1e9).astype(np.int64)
    cancel_after = cancellations(workload, options)
    shards = []
    for worker in range(num_workers):
        chosen = slice(worker, None, num_workers)
        shards.append(
            Shard(
                order=range(worker, len(workload), num_workers),
                due_ns=due_ns[chosen].tolist(),
                cancel_after=cancel_after[chosen].tolist(),
                concurrency=_part(options.concurrency, worker, num_workers),
                max_concurrency=_part(options.max_concurrency, worker, num_workers),
                overflow=options.overflow,
                drain_timeout_s=options.drain_timeout_s,
                max_retries=options.max_retries,
            )
        )
    return shards


def cancellations(workload: Trace, options: RunOptions) -> NDArray[np.int64]:
    """Returns the number of tokens after which each request is cancelled on purpose, [requests] int64; 0: never.

    A request for a single token is never cancelled.
    """
    rng = np.random.default_rng((options.seed, 0xCA7CE1))
    chosen = rng.random(len(workload)) < options.cancel_rate
    after = 1 + np.floor(rng.random(len(workload)) * (workload.output_tokens - 1)).astype(np.int64)
    return np.where(chosen & (workload.output_tokens > 1), after, 0)


def _busiest_tokens_per_s(workload: Trace) -> float:
    span_s = float(workload.arrival_s[-1]) if len(workload) else 0.0
    if span_s <= _BUSY_S:
        return float(workload.output_tokens.sum()) / max(span_s, 1.0)
    bins = np.unique(workload.arrival_s // _BUSY_S, return_inverse=True)[1]  # only those with arrivals
    return float(np.bincount(bins, weights=workload.output_tokens).max()) / _BUSY_S


def _part(total: int | None, worker: int, num_workers: int) -> int | None:
    if total is None:
        return None
    assert total >= num_workers, (total, num_workers)
    return total // num_workers + (worker < total % num_workers)
