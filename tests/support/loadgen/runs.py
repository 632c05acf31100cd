"""Runs that were never run, for tests: one written down request by request, one drawn from a seed.

Both give the same `RunData` a real run would give, its chunks in the order the store keeps them in.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.arrivals import gamma
from loadgen.record import ABSENT, CHUNK, RunData, Status, WorkerHealth, new_requests
from loadgen.store import in_order
from loadgen.trace.schema import Accounting, Blocks, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

SETTINGS: Mapping[str, Any] = {
    "target": "grpc://127.0.0.1:50051",
    "model": "demo",
    "closed_loop": False,
    "max_concurrency": None,
    "pinned_salt": False,
    "ignore_eos": True,
}
_NEVER_SENT = (Status.UNSENT, Status.DROPPED)


@dataclass(frozen=True, slots=True)
class Answered:
    """One request of a run that is written down by hand. Times are seconds from the start of the run.

    Attributes:
        due_s: when it was due.
        chunks: (arrival in seconds, tokens) of each message.
        sent_s: None: when it was due, and never where the status says so.
        ended_s: None: with the last message, or never where it was not sent or is still in flight.
        status: what became of it.
        output_tokens: planned; None: as many as came.
        server_input_tokens, server_output_tokens, cached_tokens: what the server said; ABSENT if nothing.
        queued_us, prefill_us: the server's account of its time.
        lost_chunks: messages that were counted but whose times found no room.
        error: its text.
    """

    due_s: float
    chunks: tuple[tuple[float, int], ...] = ()
    sent_s: float | None = None
    ended_s: float | None = None
    status: Status = Status.OK
    input_tokens: int = 16
    output_tokens: int | None = None
    server_input_tokens: int = ABSENT
    server_output_tokens: int = ABSENT
    cached_tokens: int = ABSENT
    queued_us: int = ABSENT
    prefill_us: int = ABSENT
    lost_chunks: int = 0
    worker: int = 0
    error: str = ""


def run_of(
    answered: Sequence[Answered],
    *,
    blocks: Blocks | None = None,
    workers: Sequence[WorkerHealth] | None = None,
    ended_s: float | None = None,
    interrupted: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> RunData:
    """The run in which exactly this happened; requests in order of `due_s`, settings on top of SETTINGS."""
    requests = new_requests(len(answered))
    errors = tuple(dict.fromkeys(one.error for one in answered if one.error))
    rows: list[tuple[int, int, int]] = []
    for index, one in enumerate(answered):
        row = requests[index]
        row["status"], row["worker"], row["scheduled_ns"] = one.status, one.worker, _ns(one.due_s)
        if one.status not in _NEVER_SENT:
            row["sent_ns"] = _ns(one.due_s if one.sent_s is None else one.sent_s)
        if one.chunks:
            row["first_ns"], row["last_ns"] = _ns(one.chunks[0][0]), _ns(one.chunks[-1][0])
        if one.ended_s is not None:
            row["ended_ns"] = _ns(one.ended_s)
        elif one.status not in (*_NEVER_SENT, Status.IN_FLIGHT):
            row["ended_ns"] = row["last_ns"] if one.chunks else row["sent_ns"]
        row["num_chunks"] = len(one.chunks) + one.lost_chunks
        row["num_tokens"] = sum(tokens for _, tokens in one.chunks)
        row["server_input_tokens"], row["server_output_tokens"] = one.server_input_tokens, one.server_output_tokens
        row["server_cached_tokens"] = one.cached_tokens
        row["server_queued_us"], row["server_prefill_us"] = one.queued_us, one.prefill_us
        row["error"] = errors.index(one.error) if one.error else ABSENT
        rows.extend((index, tokens, _ns(at_s)) for at_s, tokens in one.chunks)
    if ended_s is None:
        ended_s = _end_s(requests)
    planned = [
        sum(tokens for _, tokens in one.chunks) if one.output_tokens is None else one.output_tokens for one in answered
    ]
    return RunData(
        workload=workload_of(
            np.array([one.due_s for one in answered], dtype=np.float64),
            np.array([one.input_tokens for one in answered], dtype=np.int64),
            np.maximum(np.array(planned, dtype=np.int64), 1),
            blocks,
        ),
        requests=requests,
        chunks=in_order(np.array(rows, dtype=CHUNK), requests),
        errors=errors,
        workers=tuple(workers) if workers is not None else (healthy(0, ended_s),),
        ended_s=ended_s,
        interrupted=interrupted,
        settings={**SETTINGS, **(settings or {})},
    )


def synthetic_run(
    count: int = 200,
    *,
    rate: float = 20.0,
    seed: int = 0,
    noise_seed: int | None = None,
    ttft_ms: float = 80.0,
    itl_ms: float = 12.0,
    jitter: float = 0.2,
    slowing: float = 0.0,
    tokens_per_message: int = 1,
    input_tokens: tuple[int, int] = (32, 512),
    output_tokens: tuple[int, int] = (8, 128),
    shared_block_tokens: int | None = None,
    outcomes: Mapping[Status, int] | None = None,
    lag_ms: float = 0.05,
    num_workers: int = 2,
    settings: Mapping[str, Any] | None = None,
) -> RunData:
    """A run drawn from seeds: latencies are log-normal around what is asked for.

    Args:
        count: requests.
        rate: per second, Poisson.
        seed: of the workload (arrivals, lengths, outcomes): equal seeds, equal workload digests.
        noise_seed: of the latencies; None: `seed`.
        ttft_ms: median time to first token of a prompt of mean length; half of it grows with the length.
        itl_ms: median time per token.
        jitter: sigma of the logarithm of each latency.
        slowing: share by which latencies grow from the first request to the last: 1.0 doubles them.
        tokens_per_message: of every message but the last.
        input_tokens, output_tokens: inclusive ranges, uniform.
        shared_block_tokens: None: nothing is shared; else prompts of such blocks share one of eight beginnings.
        outcomes: how many requests end otherwise than OK, drawn at random; UNSENT ones are the last.
        lag_ms: mean delay of sending, exponential.
        num_workers: requests go to them in turn.
        settings: on top of SETTINGS.
    """
    plan = np.random.default_rng(seed)
    arrival_s = gamma(rate, count, seed=seed)
    arrival_s = arrival_s - arrival_s[0] if count else arrival_s
    lengths = plan.integers(*input_tokens, count, endpoint=True)
    answers = plan.integers(*output_tokens, count, endpoint=True)
    blocks = None if shared_block_tokens is None else _shared_blocks(lengths, shared_block_tokens, plan)
    ends = np.full(count, Status.OK, dtype=np.int8)
    unusual = [status for status, number in (outcomes or {}).items() for _ in range(number) if status != Status.UNSENT]
    num_due = count - (outcomes or {}).get(Status.UNSENT, 0)
    ends[plan.permutation(num_due)[: len(unusual)]] = unusual
    ends[num_due:] = Status.UNSENT

    noise = np.random.default_rng([seed if noise_seed is None else noise_seed, 1])
    slower = 1.0 + slowing * np.linspace(0.0, 1.0, max(count, 1))
    requests = new_requests(count)
    requests["status"] = ends
    requests["worker"] = np.arange(count) % num_workers
    requests["scheduled_ns"] = np.round(arrival_s * 1e9).astype(np.int64)
    sent_ns = requests["scheduled_ns"] + (noise.exponential(lag_ms, count) * 1e6).astype(np.int64)
    ttft = ttft_ms * 1e6 * (0.5 + 0.5 * lengths / (sum(input_tokens) / 2)) * slower
    first_ns = sent_ns + (ttft * np.exp(jitter * noise.standard_normal(count))).astype(np.int64)
    parts: list[NDArray[Any]] = []
    for index in range(count):
        row, status = requests[index], Status(int(ends[index]))
        row["scheduled_ns"] = ABSENT if status == Status.UNSENT else row["scheduled_ns"]
        if status in _NEVER_SENT:
            continue
        row["sent_ns"] = sent_ns[index]
        if status == Status.ERROR:
            row["ended_ns"], row["error"] = sent_ns[index] + 1_000_000, 0
            continue
        chunks = _messages(int(answers[index]), tokens_per_message)
        gaps = itl_ms * 1e6 * slower[index] * chunks * np.exp(jitter * noise.standard_normal(len(chunks)))
        gaps[0] = 0.0
        if status != Status.OK:  # half of the answer came
            chunks, gaps = chunks[: (len(chunks) + 1) // 2], gaps[: (len(chunks) + 1) // 2]
        part = np.empty(len(chunks), dtype=CHUNK)
        part["request"], part["tokens"] = index, chunks
        part["arrived_ns"] = first_ns[index] + np.cumsum(gaps).astype(np.int64)
        parts.append(part)
        row["first_ns"], row["last_ns"] = part["arrived_ns"][0], part["arrived_ns"][-1]
        row["num_chunks"], row["num_tokens"] = len(chunks), chunks.sum()
        row["ended_ns"] = ABSENT if status == Status.IN_FLIGHT else part["arrived_ns"][-1] + 200_000
        row["server_input_tokens"], row["server_cached_tokens"] = lengths[index], 0
        row["server_output_tokens"] = chunks.sum() if status == Status.OK else ABSENT
    ended_s = _end_s(requests)
    return RunData(
        workload=workload_of(arrival_s, lengths, answers, blocks),
        requests=requests,
        chunks=in_order(np.concatenate([np.empty(0, dtype=CHUNK), *parts]), requests),
        errors=("UNAVAILABLE: the engine is away",) if (ends == Status.ERROR).any() else (),
        workers=tuple(healthy(worker, ended_s) for worker in range(num_workers)),
        ended_s=ended_s,
        settings={**SETTINGS, **(settings or {})},
    )


def workload_of(
    arrival_s: "NDArray[np.float64]",
    input_tokens: "NDArray[np.int64]",
    output_tokens: "NDArray[np.int64]",
    blocks: Blocks | None = None,
) -> Trace:
    """A trace of these columns, as if read from a file in which nothing else stood."""
    content = b"".join(np.ascontiguousarray(column).tobytes() for column in (arrival_s, input_tokens, output_tokens))
    return Trace(
        name="synthetic",
        format="synthetic",
        digest=hashlib.sha256(content).hexdigest(),
        arrival_s=arrival_s,
        input_tokens=input_tokens.astype(np.int64),
        output_tokens=output_tokens.astype(np.int64),
        rows=np.arange(len(arrival_s), dtype=np.int64),
        accounting=Accounting(read=len(arrival_s)),
        blocks=blocks,
    )


def healthy(worker: int, seconds: float, *, lag_ms: float = 0.2, cpu_share: float = 0.2) -> WorkerHealth:
    """A worker whose every tick came `lag_ms` late and that used `cpu_share` of a core in every second."""
    return WorkerHealth(
        worker=worker,
        loop_lag_ms=np.full(int(seconds * 100) + 1, lag_ms, dtype=np.float64),
        cpu_share=np.full(int(seconds) + 1, cpu_share, dtype=np.float64),
    )


def with_requests(run: RunData, **columns: object) -> RunData:
    """The same run with columns of REQUEST set to other values."""
    requests = run.requests.copy()
    for name, values in columns.items():
        requests[name] = values
    return replace(run, requests=requests)


def _end_s(requests: "NDArray[Any]") -> float:
    return max(int(requests[name].max(initial=0)) for name in ("scheduled_ns", "last_ns", "ended_ns")) / 1e9


def _messages(tokens: int, tokens_per_message: int) -> "NDArray[np.int64]":
    whole, rest = divmod(tokens, tokens_per_message)
    return np.array([tokens_per_message] * whole + ([rest] if rest else []), dtype=np.int64)


def _shared_blocks(lengths: "NDArray[np.int64]", block_tokens: int, plan: np.random.Generator) -> Blocks:
    rows, next_id = [], 8
    for length in lengths:
        own = -(-int(length) // block_tokens) - 1
        rows.append(np.array([int(plan.integers(8)), *range(next_id, next_id + own)], dtype=np.int64))
        next_id += own
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in rows]))).astype(np.int64)
    return Blocks(np.concatenate([np.zeros(0, dtype=np.int64), *rows]), offsets, block_tokens)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
