"""What this host can measure: messages a second before its own load shows in the latencies, and the error with which
known latencies are found again.

Mock servers on the same host send at a known pace; more and more streams are opened until that pace is no longer what
is seen. A rate without pauses would be higher and say little: messages that come one by one wake the client each time.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loadgen.errors import TargetError
from loadgen.host import busy_now
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.running import mock_in_processes
from loadgen.record import RunData, Status
from loadgen.run.ceiling import Ceiling, this_host
from loadgen.run.controller import RunOptions, run_workload
from loadgen.target.base import TargetSpec
from loadgen.trace.schema import Accounting, Trace

Protocol = Literal["grpc", "http"]
Say = Callable[[str], None]
_TTFT_S, _ITL_S = 0.05, 0.01
_RAMP_S = 1.0  # streams are opened one after the other for so long, before anything is measured
_MIN_DELIVERED, _MAX_GAP_ERROR_MS, _MAX_LAG_MS = 0.97, 5.0, 5.0
_BUSY_BEFORE = 0.2
_TRIES = 3  # a moment of other load must not count as the host's limit
_FIRST_STREAMS, _GROWTH, _MAX_STREAMS = 16, 1.4, 20_000
_INPUT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Trial:
    """One load that was tried.

    Attributes:
        num_streams: at once, each sending a message every 10 ms.
        delivered: messages seen over messages due in the measured time.
        gap_error_ms: 90th percentile of how far the gap between two messages was off 10 ms.
        lag_ms: 90th percentile of the lateness of the worst event loop.
    """

    num_streams: int
    delivered: float
    gap_error_ms: float
    lag_ms: float

    @property
    def messages_per_s(self) -> float:
        """That were due."""
        return self.num_streams / _ITL_S

    @property
    def is_good(self) -> bool:
        """Whether the client kept up."""
        return not self.broken

    @property
    def broken(self) -> tuple[str, ...]:
        """The limits that were not kept."""
        limits = {
            f"fewer than {_MIN_DELIVERED:.0%} seen in time": self.delivered < _MIN_DELIVERED,
            f"gaps off by more than {_MAX_GAP_ERROR_MS:g} ms": self.gap_error_ms > _MAX_GAP_ERROR_MS,
            f"event loop late by more than {_MAX_LAG_MS:g} ms": self.lag_ms > _MAX_LAG_MS,
        }
        return tuple(limit for limit, is_broken in limits.items() if is_broken)

    def __str__(self) -> str:
        return (
            f"{self.messages_per_s:.0f} messages/s: {self.delivered:.1%} seen in time, gaps off by up to "
            f"{self.gap_error_ms:.1f} ms, event loop late by up to {self.lag_ms:.1f} ms (p90): "
            f"{'too much: ' + ', '.join(self.broken) if self.broken else 'kept up'}"
        )


def calibrate(protocol: Protocol, *, hold_s: float = 3.0, say: Say) -> Ceiling:
    """Finds this host's figures; takes a minute or two. Nothing else should run meanwhile.

    Args:
        protocol: to be measured.
        hold_s: how long each load is held.
        say: called with each line of the result.

    Raises: TargetError: not even the lightest load was seen as it was sent: the host is too busy.
    """
    host, num_cpus, python = this_host()
    busy = busy_now()
    if busy is not None and busy > _BUSY_BEFORE:
        say(
            f"warning: these {num_cpus} cores are {busy:.0%} busy before anything is started: other work here makes "
            "the figures too low; stop it and calibrate again"
        )
    null_rate = _null_rate()
    say(f"one worker alone, no server: {null_rate:.0f} messages/s noted")
    per_worker = _highest(protocol, 1, hold_s, say)
    num_workers = max(1, num_cpus // 2)  # a mock server needs about a core for each
    together = per_worker if num_workers == 1 else _highest(protocol, num_workers, hold_s, say)
    ttft_ms, itl_ms, tpot_ms = recovered_ms(protocol, hold_s)
    say(f"known latencies recovered: TTFT {ttft_ms:+.2f} ms of 50, ITL {itl_ms:+.3f} ms of 10, TPOT {tpot_ms:+.3f} ms")
    return Ceiling(
        protocol=protocol,
        messages_per_s=together,
        messages_per_s_per_worker=per_worker,
        num_workers=num_workers,
        null_messages_per_s=null_rate,
        ttft_error_ms=ttft_ms,
        itl_error_ms=itl_ms,
        tpot_error_ms=tpot_ms,
        host=host,
        num_cpus=num_cpus,
        python=python,
        found_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def recovered_ms(protocol: Protocol, duration_s: float) -> tuple[float, float, float]:
    """Median errors of TTFT, ITL and TPOT, measured minus true, in milliseconds, at 5 requests/s of 20 tokens."""
    count = max(8, math.ceil(5 * duration_s))
    behaviour = MockBehaviour(ttft_s=_TTFT_S, itl_s=_ITL_S)
    with mock_in_processes("grpc" if protocol == "grpc" else "openai", behaviour) as url:
        run = _all_answered(
            run_workload(
                _workload(np.linspace(0.0, (count - 1) / 5, count), 20), _spec(protocol, url), RunOptions(workers=1)
            )
        )
    rows = run.requests
    return (
        float(np.median(rows["first_ns"] - rows["scheduled_ns"])) / 1e6 - 1e3 * _TTFT_S,
        float(np.median(_gaps_ms(run))) - 1e3 * _ITL_S,
        float(np.median((rows["last_ns"] - rows["first_ns"]) / (rows["num_tokens"] - 1))) / 1e6 - 1e3 * _ITL_S,
    )


def try_load(protocol: Protocol, url: str, num_streams: int, num_workers: int, hold_s: float) -> Trial:
    """Opens `num_streams` streams within a second and holds them; mock servers at `url` send every 10 ms on each."""
    arrival_s = np.linspace(0.0, _RAMP_S, num_streams, endpoint=False, dtype=np.float64)
    output_tokens = math.ceil((_RAMP_S + hold_s) / _ITL_S)
    run = _all_answered(
        run_workload(_workload(arrival_s, output_tokens), _spec(protocol, url), RunOptions(workers=num_workers))
    )
    arrived_s = run.chunks["arrived_ns"] / 1e9
    start_s, end_s = _RAMP_S + _TTFT_S, _RAMP_S + hold_s
    seen = int(((arrived_s >= start_s) & (arrived_s < end_s)).sum())
    return Trial(
        num_streams=num_streams,
        delivered=seen / (num_streams / _ITL_S * (end_s - start_s)),
        gap_error_ms=float(np.quantile(np.abs(_gaps_ms(run) - 1e3 * _ITL_S), 0.9)),
        lag_ms=max(float(np.quantile(worker.loop_lag_ms, 0.9)) for worker in run.workers),
    )


def _highest(protocol: Protocol, num_workers: int, hold_s: float, say: Say) -> float:
    """Messages/s of the last load that was seen as it was sent."""
    best = 0.0
    behaviour = MockBehaviour(ttft_s=_TTFT_S, itl_s=_ITL_S)
    with mock_in_processes("grpc" if protocol == "grpc" else "openai", behaviour, num_workers) as url:
        for num_streams in _ladder(num_workers):
            for _ in range(_TRIES):
                trial = try_load(protocol, url, num_streams, num_workers, hold_s)
                say(f"{num_workers} worker{'s' * (num_workers > 1)}, {trial}")
                if trial.is_good:
                    break
            if not trial.is_good:
                break
            best = trial.messages_per_s
    if not best:
        raise TargetError(f"{trial}: the host is too busy to be calibrated; leave it alone meanwhile")
    return best


def _ladder(num_workers: int) -> Iterator[int]:
    num_streams = float(_FIRST_STREAMS * num_workers)
    while num_streams < _MAX_STREAMS * num_workers:
        yield round(num_streams)
        num_streams *= _GROWTH


def _null_rate() -> float:
    run = _all_answered(
        run_workload(_workload(np.zeros(2000), 100), TargetSpec("null:", "null"), RunOptions(workers=1, concurrency=64))
    )
    return len(run.chunks) / (float(np.ptp(run.chunks["arrived_ns"])) / 1e9)


def _spec(protocol: Protocol, url: str) -> TargetSpec:
    return TargetSpec(url, "grpc" if protocol == "grpc" else "completions")


def _workload(arrival_s: NDArray[np.float64], output_tokens: int) -> Trace:
    count = len(arrival_s)
    return Trace(
        name="calibration",
        format="made up",
        digest="",
        arrival_s=arrival_s,
        input_tokens=np.full(count, _INPUT_TOKENS),
        output_tokens=np.full(count, output_tokens),
        rows=np.arange(count),
        accounting=Accounting(count),
    )


def _gaps_ms(run: RunData) -> NDArray[np.float64]:
    """Between messages of the same answer."""
    chunks = run.chunks[np.lexsort((run.chunks["arrived_ns"], run.chunks["request"]))]
    gaps = np.diff(chunks["arrived_ns"])[np.diff(chunks["request"]) == 0]
    return np.asarray(gaps / 1e6, dtype=np.float64)


def _all_answered(run: RunData) -> RunData:
    """Raises: TargetError: an answer of a mock server is missing; KeyboardInterrupt: Ctrl-C."""
    if run.interrupted:
        raise KeyboardInterrupt
    failed = int((run.requests["status"] != Status.OK).sum())
    if failed:
        raise TargetError(f"{failed} of {len(run.requests)} requests to a mock server failed: {'; '.join(run.errors)}")
    return run
