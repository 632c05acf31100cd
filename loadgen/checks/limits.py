"""Limits of the checks, above which a run is DEGRADED or INVALID."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from loadgen.checks.finding import Bounds


class Limits(NamedTuple):
    """Above the first figure a run is DEGRADED, above the second INVALID. Shares are of 1.

    Attributes:
        dispatch_lag_ms: of t_send - t_sched, 99th percentile.
        dispatch_lag_of_ttft: the same against the median TTFT, whichever is the smaller.
        dispatch_lag_floor_ms: least limit of both: no client in Python is more punctual.
        rate_off: achieved rate against the requested one.
        loop_lag_ms: of the ticks of a worker's event loop, 99th percentile of the worst worker.
        cpu_share: of a worker: DEGRADED in any second, INVALID in five in a row.
        in_flight_off: requests in flight by the server's account against the client's.
        in_flight_floor_ms: median time outside the server's account below which that is not judged.
        input_tokens_off, output_tokens_off: tokens against the plan.
        cache_above_ideal: cached tokens beyond the workload's own sharing, of all prompt tokens.
        error_share: errors, timeouts and requests left unfinished, of all that were sent.
        dropped_share: requests dropped at `--max-concurrency`, of all offered.
        chunks_lost: messages whose times found no room, of all.
        ceiling_share: of the messages per second that `calibrate` found this host to measure well.
    """

    dispatch_lag_ms: Bounds = Bounds(10.0, 100.0)
    dispatch_lag_of_ttft: Bounds = Bounds(0.05, 0.25)
    dispatch_lag_floor_ms: Bounds = Bounds(1.0, 10.0)
    rate_off: Bounds = Bounds(0.01, 0.05)
    loop_lag_ms: Bounds = Bounds(5.0, 50.0)
    cpu_share: Bounds = Bounds(0.70, 0.95)
    in_flight_off: Bounds = Bounds(0.02, 0.10)
    in_flight_floor_ms: float = 10.0
    input_tokens_off: Bounds = Bounds(0.01, 0.05)
    output_tokens_off: Bounds = Bounds(0.01, 0.05)
    cache_above_ideal: Bounds = Bounds(0.01, 0.05)
    error_share: Bounds = Bounds(0.001, 0.05)
    dropped_share: Bounds = Bounds(0.0)
    chunks_lost: Bounds = Bounds(0.0, 0.05)
    ceiling_share: Bounds = Bounds(0.60)

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """Returns the limits of a run: the defaults, with its `max_error_rate`."""
        usual, rate = cls(), settings.get("max_error_rate")
        if rate is None:
            return usual
        return usual._replace(error_share=Bounds(min(usual.error_share.degraded, rate), rate))
