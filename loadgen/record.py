"""What is noted while a run is on: one row per request, one row per message with tokens. Everything else is derived.

Workers write into arrays that lie ready before the first request is due; nothing is formatted, sorted or added up
meanwhile. Times are nanoseconds of CLOCK_MONOTONIC counted from the start of the run; ABSENT where there was none.
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
    """The server said no, broke off, or ended without a token."""
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
    """How one worker process fared.

    Attributes:
        worker: its number.
        loop_lag_ms: [ticks] float64, how late each tick of its event loop came (every 10 ms).
        cpu_share: [seconds] float64, share of a core it used in each second of the run.
        chunks_lost: messages that were counted but whose times found no room.
        exit_code: of the process; 0 unless it died.
    """

    worker: int
    loop_lag_ms: "NDArray[np.float64]"
    cpu_share: "NDArray[np.float64]"
    chunks_lost: int = 0
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class RunData:
    """Everything that is known of a run: reports are made from this alone, and `report DIR` makes them again.

    Attributes:
        workload: what was to be run; arrivals counted from the start of the run.
        requests: [requests] of REQUEST, in the order of the workload.
        chunks: [messages] of CHUNK.
        errors: distinct error texts; REQUEST's `error` counts into it.
        workers: one each.
        ended_s: when the last request was over, or the run stopped, seconds from the start.
        interrupted: stopped by Ctrl-C: the report is of a part.
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
    """A look at a run while it is on, some times a second.

    Attributes:
        elapsed_s: since the start of the run; negative before it.
        requests: [requests] of REQUEST, being written by others: read, never keep.
        duration_s: when the last request is due.
    """

    elapsed_s: float
    requests: "NDArray[Any]"
    duration_s: float
