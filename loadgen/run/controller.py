"""Runs a workload: starts the workers at a common time, monitors them, and collects their records.

A request passes no queue and no message between processes. All processes of a host share CLOCK_MONOTONIC, so times
counted from the common start are the same in all of them.
"""

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import OptionError
from loadgen.host import HostWatch
from loadgen.prompts.text import TextMeasure
from loadgen.record import ABSENT, CHUNK, REQUEST, LiveView, RunData, Status, WorkerHealth, new_requests
from loadgen.run.ceiling import stored_ceiling, this_host
from loadgen.run.options import RunOptions
from loadgen.run.shards import make_shards, worker_count
from loadgen.run.shared_arrays import PROGRESS, SharedArray
from loadgen.run.worker import Opened, Prepare, Ready, Start, WorkerPlan
from loadgen.run.worker_pool import CtrlC, WorkerHandle, WorkerPool
from loadgen.target.base import TargetFacts, TargetSpec, without_credentials
from loadgen.target.open import check_spec
from loadgen.trace.schema import Trace, workload_digest

__all__ = ["RunOptions", "run_workload"]

_START_LEAD_NS = 300_000_000  # for the message to reach every worker
_LOOK_S = 0.25
_MAX_CHUNKS = 32 << 20  # 512 MB
OnProgress = Callable[[LiveView], None]
OnOpened = Callable[[TargetFacts], None]
OnInterrupt = Callable[[int], None]


class _Memory(NamedTuple):
    """Arrays that all processes share."""

    requests: SharedArray
    chunks: list[SharedArray]
    progress: SharedArray


def run_workload(
    workload: Trace,
    spec: TargetSpec,
    options: RunOptions | None = None,
    on_progress: OnProgress | None = None,
    *,
    on_opened: OnOpened | None = None,
    on_interrupt: OnInterrupt | None = None,
) -> RunData:
    """Runs a workload to its end, and blocks meanwhile. Processes are spawned: importing the main module must be safe.

    Ctrl-C cancels the requests in flight and returns the records so far, with `interrupted` set. A second Ctrl-C raises
    KeyboardInterrupt, and so does one before the start.

    Args:
        workload: arrivals counted from the start of the run.
        spec: the server.
        options: None takes the defaults.
        on_progress: called about four times a second.
        on_opened: called once, before the first request, with the facts that the server reports.
        on_interrupt: called at Ctrl-C with the number of requests that are cancelled.

    Raises:
        TargetError: the server cannot be reached or measured; nothing was run.
        OptionError: options that cannot work, or nothing to run.
    """
    options = options or RunOptions()
    check_spec(spec)
    if len(workload) == 0:
        raise OptionError("the workload has no requests")
    salt = options.salt or secrets.token_hex(8)
    num_workers, warning = worker_count(workload, options, this_host()[1])
    memory = _memory(workload, num_workers, is_closed_loop=options.concurrency is not None)
    if options.targets is not None:
        memory.requests.rows()["service_class"] = options.targets.draw(len(workload), options.seed)
    with WorkerPool(_plans(workload, spec, options, salt, memory)) as pool:
        opened = pool.replies(Opened)[0]
        if on_opened is not None:
            on_opened(opened.facts)
        pool.send(Prepare(opened.measure))
        pool.replies(Ready)
        start_ns = time.monotonic_ns() + _START_LEAD_NS
        started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
        host = HostWatch()
        with CtrlC() as ctrl_c:
            pool.send(Start(start_ns))
            _watch(pool, ctrl_c, start_ns, memory, workload, host, on_progress)
            if ctrl_c.received and on_interrupt is not None:
                on_interrupt(int((memory.requests.rows()["status"] == Status.IN_FLIGHT).sum()))
            pool.stop()
        stopped_ns = time.monotonic_ns() - start_ns
        handles = pool.handles
    requests = memory.requests.rows().copy()
    errors = _gather_errors(requests, handles, start_ns)
    settings = _settings(workload, spec, options, opened.facts, opened.measure)
    settings |= {
        "salt": salt,
        "workers": num_workers,
        "warnings": [warning] if warning else [],
        "started_at": started_at,
        "start_monotonic_ns": start_ns,
        "host_busy": host.busy(),
        "ceiling_messages_per_s": ceiling.of(num_workers) if (ceiling := stored_ceiling(spec.api)) else None,
    }
    is_unfinished = ctrl_c.received or bool((requests["status"] == Status.IN_FLIGHT).any())
    ended_ns = stopped_ns if is_unfinished else int(requests["ended_ns"].max())
    return RunData(
        workload=workload,
        requests=requests,
        chunks=_gather_chunks(memory),
        errors=errors,
        workers=tuple(_health(handle, memory) for handle in handles),
        ended_s=max(ended_ns, 0) / 1e9,
        interrupted=ctrl_c.received,
        settings=settings,
    )


def _plans(workload: Trace, spec: TargetSpec, options: RunOptions, salt: str, memory: _Memory) -> list[WorkerPlan]:
    """Returns what each worker is started with, one for each array of chunks."""
    num_workers = len(memory.chunks)
    return [
        WorkerPlan(
            worker=worker,
            num_workers=num_workers,
            workload=workload,
            spec=spec,
            shard=shard,
            salt=salt,
            vocab_size=options.vocab_size,
            vocabulary=options.vocabulary,
            probe_timeout_s=options.probe_timeout_s,
            targets=options.targets,
            requests=memory.requests,
            chunks=memory.chunks[worker],
            progress=memory.progress,
        )
        for worker, shard in enumerate(make_shards(workload, options, num_workers))
    ]


def _memory(workload: Trace, num_workers: int, *, is_closed_loop: bool) -> _Memory:
    requests = SharedArray.new(len(workload), REQUEST)
    rows = requests.rows()
    rows[:] = new_requests(len(workload))
    rows["worker"] = np.arange(len(workload)) % num_workers
    if not is_closed_loop:
        rows["scheduled_ns"] = np.round(workload.arrival_s * 1e9)
    chunks = []
    for worker in range(num_workers):
        output_tokens = workload.output_tokens[worker::num_workers]
        room = min(int(output_tokens.sum()) + len(output_tokens), _MAX_CHUNKS // num_workers)
        chunks.append(SharedArray.new(room, CHUNK))
    return _Memory(requests, chunks, SharedArray.new(num_workers, PROGRESS))


def _watch(
    pool: WorkerPool,
    ctrl_c: CtrlC,
    start_ns: int,
    memory: _Memory,
    workload: Trace,
    host: HostWatch,
    on_progress: OnProgress | None,
) -> None:
    """Waits until all workers have ended, or for Ctrl-C; reports progress."""
    requests = memory.requests.rows()
    duration_s = float(workload.arrival_s[-1])

    def look() -> None:
        host.look()
        if on_progress is not None:
            on_progress(LiveView((time.monotonic_ns() - start_ns) / 1e9, requests, duration_s))

    look_s = time.monotonic()
    while pool.is_running and not ctrl_c.received:
        pool.listen(max(look_s - time.monotonic(), 0.0))
        if time.monotonic() >= look_s:
            look()
            look_s = time.monotonic() + _LOOK_S
    look()


def _gather_errors(requests: NDArray[Any], handles: list[WorkerHandle], start_ns: int) -> tuple[str, ...]:
    """Merges the workers' error texts and renumbers them; unfinished requests of a dead worker become errors."""
    texts: dict[str, int] = {}
    for handle in handles:
        ours = requests["worker"] == handle.number
        own = np.array([texts.setdefault(text, len(texts)) for text in handle.errors], dtype=np.int64)
        noted = np.flatnonzero(ours & (requests["error"] != ABSENT))
        known = requests["error"][noted] < len(own)  # a text may have died with its worker
        requests["error"][noted[known]] = own[requests["error"][noted[known]]]
        if handle.exit_code is not None:
            text = f"worker {handle.number} died with exit code {handle.exit_code}"
            number = texts.setdefault(text, len(texts))
            requests["error"][noted[~known]] = number
            undone = ours & np.isin(requests["status"], (Status.UNSENT, Status.IN_FLIGHT))
            requests["ended_ns"][undone & (requests["status"] == Status.IN_FLIGHT)] = handle.died_ns - start_ns
            requests["status"][undone] = Status.ERROR
            requests["error"][undone] = number
    return tuple(texts)


def _gather_chunks(memory: _Memory) -> NDArray[Any]:
    counts = memory.progress.rows()["num_chunks"]
    return np.concatenate([chunks.rows()[:count] for chunks, count in zip(memory.chunks, counts, strict=True)])


def _health(handle: WorkerHandle, memory: _Memory) -> WorkerHealth:
    lost = int(memory.progress.rows()["chunks_lost"][handle.number])
    if handle.done is None:
        return WorkerHealth(handle.number, np.zeros(0), np.zeros(0), lost, handle.exit_code or -1)
    return WorkerHealth(handle.number, handle.done.loop_lag_ms, handle.done.cpu_share, lost)


def _settings(
    workload: Trace, spec: TargetSpec, options: RunOptions, facts: TargetFacts, measure: TextMeasure | None
) -> dict[str, Any]:
    """Returns the settings of the run, without secrets."""
    of_spec = ("api", "prompt_mode", "temperature", "ignore_eos", "timeout_s")
    of_run = ("concurrency", "max_concurrency", "overflow", "cancel_rate", "drain_timeout_s", "seed", "max_retries")
    of_text = ("overhead_tokens", "tokens_per_word", "mismatch")
    return {
        "target": without_credentials(spec.url),
        "model": facts.model,
        "model_version": facts.version,
        "max_model_len": facts.max_model_len,
        "vocab_size": options.vocabulary.size if options.vocabulary else options.vocab_size or facts.vocab_size,
        "closed_loop": options.concurrency is not None,
        "pinned_salt": bool(options.salt),
        "workload_digest": workload_digest(workload),
        "text_prompts": measure and {"words": len(measure.words), **{name: getattr(measure, name) for name in of_text}},
        "service_classes": options.targets and options.targets.as_json(),
        "sends_class_names": options.targets and options.targets.sends_names,
        **{name: getattr(spec, name) for name in of_spec},
        **{name: getattr(options, name) for name in of_run},
    }
