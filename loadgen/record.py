"""Records of a run: one row per request and one per message with tokens. Everything else is derived from them.

Workers write into arrays that are allocated before the first request is due; nothing is formatted, sorted or added up
during the run. Times are nanoseconds of CLOCK_MONOTONIC counted from the start of the run; ABSENT where there was none.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgen.trace.schema import Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

ABSENT = -1


class Status(IntEnum):
    """What became of a request."""

    UNSENT = 0
    """The run was stopped before it was due."""
    IN_FLIGHT = 1
    """Sent, and not over when the run was stopped."""
    OK = 2
    ERROR = 3
    """The server refused it, ended it early, or sent no token."""
    TIMEOUT = 4
    CANCELLED = 5
    """By us, on purpose (`--cancel-rate`)."""
    DROPPED = 6
    """Never sent: `--max-concurrency` were in flight and `--overflow drop`."""
    REFUSED = 7
    """The server said that its latency targets cannot be met, and it did not come back, or was refused again."""


REQUEST = np.dtype(
    [
        ("status", "i1"),
        ("worker", "i2"),
        ("scheduled_ns", "i8"),  # when it was due; in a closed loop, when its turn came
        ("sent_ns", "i8"),  # just before the first call
        ("retry_due_ns", "i8"),  # when the server told a refused request to come back, the last time
        ("resent_ns", "i8"),  # just before the last call, if there were several
        ("num_retries", "i2"),  # calls after the first
        ("retry_lag_ns", "i8"),  # how late the latest of them was made, after its retry_due_ns
        ("first_ns", "i8"),  # arrival of the first message with a token
        ("last_ns", "i8"),  # arrival of the last message with a token
        ("ended_ns", "i8"),  # status known
        ("num_chunks", "i4"),  # messages with tokens
        ("num_tokens", "i4"),  # tokens counted in them
        ("server_input_tokens", "i4"),  # as the server counted, ABSENT if it does not say
        ("server_output_tokens", "i4"),
        ("server_cached_tokens", "i4"),
        ("server_queued_us", "i8"),  # the server's own account of its time
        ("server_prefill_us", "i8"),
        ("server_preemptions", "i4"),
        ("error", "i4"),  # index into RunData.errors
        ("service_class", "i2"),  # index into RunData.settings["service_classes"]
    ]
)
"""One request."""

CHUNK = np.dtype([("request", "i4"), ("tokens", "i4"), ("arrived_ns", "i8")])
"""One message with tokens, in the order of arrival within a worker."""


def new_requests(count: int) -> "NDArray[Any]":
    """[count] of REQUEST: unsent, everything absent, nothing counted."""
    requests = np.zeros(count, dtype=REQUEST)
    for name in REQUEST.names or ():
        if name not in ("status", "num_chunks", "num_tokens", "num_retries"):
            requests[name] = ABSENT
    return requests


@dataclass(frozen=True, slots=True)
class WorkerHealth:
    """Health of one worker process.

    Attributes:
        worker: its number.
        loop_lag_ms: [ticks] float64, delay of each tick of its event loop (every 10 ms).
        cpu_share: [seconds] float64, share of a core it used in each second of the run.
        chunks_lost: messages that were counted but whose times exceeded the array.
        exit_code: of the process; 0 unless it died.
    """

    worker: int
    loop_lag_ms: "NDArray[np.float64]"
    cpu_share: "NDArray[np.float64]"
    chunks_lost: int = 0
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class RunData:
    """All records of a run. Reports are made from these alone, so that `report DIR` can make them again.

    Attributes:
        workload: what was to be run; arrivals counted from the start of the run.
        requests: [requests] of REQUEST, in the order of the workload.
        chunks: [messages] of CHUNK.
        errors: distinct error texts; REQUEST's `error` is an index into them.
        workers: the health of each worker.
        ended_s: when the last request ended, or the run was stopped, in seconds from the start.
        interrupted: whether Ctrl-C stopped it, so that the report covers a part of the workload.
        settings: how it was run, as JSON can hold it: command line, target, model, salt, host, versions, limits, the
            trace's accounting, and "closed_loop", "max_concurrency", "pinned_salt" for the checks.
        server_metrics: Prometheus text before and after, where the server has it.
    """

    workload: Trace
    requests: "NDArray[Any]"
    chunks: "NDArray[Any]"
    errors: tuple[str, ...]
    workers: tuple[WorkerHealth, ...]
    ended_s: float
    interrupted: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    server_metrics: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LiveView:
    """State of a run in progress, a few times a second.

    Attributes:
        elapsed_s: since the start of the run; negative before it.
        requests: [requests] of REQUEST, which workers are writing: read it, but do not keep it.
        duration_s: when the last request is due.
    """

    elapsed_s: float
    requests: "NDArray[Any]"
    duration_s: float
