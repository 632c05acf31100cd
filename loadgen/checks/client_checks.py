"""Checks of the client: it sent everything on time, and recorded what came back. Pure."""

from dataclasses import replace

import numpy as np

from loadgen.checks.finding import Bounds, Finding, bounded, not_judged, yes_or_no
from loadgen.checks.limits import Limits
from loadgen.checks.shortage import what_helps
from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples
from loadgen.record import RunData

_SUSTAINED_S = 5


def client_checks(run: RunData, metrics: Metrics, samples: Samples, limits: Limits) -> tuple[Finding, ...]:
    """Returns all findings, passed or not."""
    return (
        _complete(run, metrics),
        _dropped(run, metrics, limits),
        _workers_alive(run),
        _dispatch_lag(run, metrics, samples, limits),
        _achieved_rate(run, samples, limits),
        _loop_lag(run, limits),
        _worker_cpu(run, limits),
        _chunk_times(run, limits),
        _ceiling(run, limits),
        yes_or_no("warnings", "client fit for the load", "VALID", "; ".join(run.settings.get("warnings") or ())),
    )


def _why_not_open(run: RunData) -> str:
    """Returns why late requests are not the client's fault; "" in an uncapped open loop."""
    if run.settings.get("closed_loop"):
        return "in a closed loop a request is due when another ends"
    if run.settings.get("max_concurrency"):
        return f"--max-concurrency {run.settings['max_concurrency']} holds requests back, and their wait counts"
    return ""


def _complete(run: RunData, metrics: Metrics) -> Finding:
    title, unsent = "run complete", metrics.whole.counts.unsent
    if run.interrupted:
        planned_s = float(run.workload.arrival_s[-1]) if len(run.workload) else 0.0
        left = f"the last request was due at {planned_s:.1f} s"
        if run.settings.get("closed_loop"):
            left = f"{unsent} of {len(run.requests)} requests were not sent"
        text = f"stopped after {run.ended_s:.1f} s, {left}: the report is of a part; let it run to its end"
        return yes_or_no("complete", title, "DEGRADED", text)
    why = "look at the workers"
    if cap := run.settings.get("max_concurrency"):
        why = f"--max-concurrency {cap} held them back until --drain-timeout; lower the rate, or raise one of these"
    elif run.settings.get("closed_loop"):
        why = "no answer ended for as long as --drain-timeout; see the server's log, or raise it"
    text = f"{unsent} of {len(run.requests)} requests were never sent: {why}" if unsent else ""
    return yes_or_no("complete", title, "INVALID", text)


def _dropped(run: RunData, metrics: Metrics, limits: Limits) -> Finding:
    counts = metrics.whole.counts
    text = (
        f"--overflow drop left out {counts.dropped} of {counts.offered} requests: the server had a lower load than was "
        "planned; lower the rate, or raise --max-concurrency"
    )
    share = counts.dropped / counts.offered if counts.offered else float("nan")
    title = "requests dropped at --max-concurrency"
    if run.settings.get("overflow") != "drop":
        return not_judged("dropped", title, limits.dropped_share, "share", "no request may be dropped")
    return bounded("dropped", title, share, limits.dropped_share, "share", text)


def _workers_alive(run: RunData) -> Finding:
    died = [f"worker {worker.worker} (exit code {worker.exit_code})" for worker in run.workers if worker.exit_code]
    text = f"{', '.join(died)} died, and its requests with it: look for memory or a crash" if died else ""
    return yes_or_no("workers_alive", "workers alive to the end", "INVALID", text)


def _dispatch_lag(run: RunData, metrics: Metrics, samples: Samples, limits: Limits) -> Finding:
    check, title = "dispatch_lag", "requests sent late, p99"
    ttft_ms = metrics.steady.latencies.service_ttft.p50
    bounds = Bounds(
        *(
            limit if np.isnan(ttft_ms) else min(limit, max(share * ttft_ms, floor))
            for limit, share, floor in zip(
                _both(limits.dispatch_lag_ms),
                _both(limits.dispatch_lag_of_ttft),
                _both(limits.dispatch_lag_floor_ms),
                strict=True,
            )
        )
    )
    if why := _why_not_open(run):
        return not_judged(check, title, bounds, "ms", why)
    late = samples.dispatch_lag[~np.isnan(samples.dispatch_lag)]
    text = f"the client could not keep its own schedule: {what_helps(run, limits)}"
    return bounded(check, title, float(np.quantile(late, 0.99)) if len(late) else float("nan"), bounds, "ms", text)


def _achieved_rate(run: RunData, samples: Samples, limits: Limits) -> Finding:
    check, title = "achieved_rate", "achieved rate off the requested one"
    if why := _why_not_open(run):
        return not_judged(check, title, limits.rate_off, "share", why)
    sent = ~np.isnan(samples.sent_s)
    due = ~np.isnan(samples.scheduled_s)
    if run.interrupted:  # what was due after the last one sent was not the client's to send
        due &= samples.scheduled_s <= samples.scheduled_s[sent].max(initial=0.0)
    planned_s, played_s = (
        float(np.ptp(at_s[sent])) if sent.any() else 0.0 for at_s in (samples.scheduled_s, samples.sent_s)
    )
    if planned_s <= 0 or played_s <= 0:
        return not_judged(check, title, limits.rate_off, "share", "all requests were due at once")
    achieved = sent.sum() / due.sum() * planned_s / played_s
    text = f"{achieved:.1%} of the requested rate was run: {what_helps(run, limits)}"
    return bounded(check, title, abs(float(achieved) - 1.0), limits.rate_off, "share", text)


def _loop_lag(run: RunData, limits: Limits) -> Finding:
    lags = [float(np.quantile(worker.loop_lag_ms, 0.99)) for worker in run.workers if len(worker.loop_lag_ms)]
    text = f"messages waited in the client before their time was taken: {what_helps(run, limits)}"
    found = bounded(
        "loop_lag",
        "event loop late, p99 of the worst worker",
        max(lags, default=float("nan")),
        limits.loop_lag_ms,
        "ms",
        text,
    )
    latest_ms = max((float(worker.loop_lag_ms.max()) for worker in run.workers if len(worker.loop_lag_ms)), default=0.0)
    if found.level != "VALID" or latest_ms <= _both(limits.loop_lag_ms)[1]:
        return found
    blocked = (
        f"the client was blocked for {latest_ms:,.0f} ms: percentiles beyond p99 and the largest values may be its own"
    )
    return replace(found, text=blocked)


def _worker_cpu(run: RunData, limits: Limits) -> Finding:
    check, title = "worker_cpu", "worker CPU, busiest second"
    shares = [worker.cpu_share for worker in run.workers if len(worker.cpu_share)]
    if not shares:
        return not_judged(check, title, limits.cpu_share, "share", "no worker lasted a second")
    worst = max(float(share.max()) for share in shares)
    windows = [
        np.lib.stride_tricks.sliding_window_view(share, _SUSTAINED_S) for share in shares if len(share) >= _SUSTAINED_S
    ]
    sustained = max((float(window.min(axis=1).max()) for window in windows), default=0.0)
    _, too_long = _both(limits.cpu_share)
    level = "INVALID" if sustained > too_long else limits.cpu_share._replace(invalid=None).level(worst)
    use = f"{sustained:.0%} of a core for {_SUSTAINED_S} s on end" if level == "INVALID" else f"{worst:.0%} of a core"
    text = f"{use} in the busiest worker: more --workers, or a lower rate"
    return Finding(check, title, level, worst, limits.cpu_share, "share", "" if level == "VALID" else text)


def _chunk_times(run: RunData, limits: Limits) -> Finding:
    lost = sum(worker.chunks_lost for worker in run.workers)
    text = f"{lost} messages found no room for their time: gaps of their requests are left out; run a shorter run"
    share = lost / max(1, lost + len(run.chunks))
    return bounded("chunk_times", "messages whose time was lost", share, limits.chunks_lost, "share", text)


def _ceiling(run: RunData, limits: Limits) -> Finding:
    check, title = "ceiling", "busiest second against this host's ceiling"
    ceiling = run.settings.get("ceiling_messages_per_s")
    if not ceiling:
        return not_judged(
            check, title, limits.ceiling_share, "share", "no ceiling is known; `chairlift-loadgen calibrate` finds it"
        )
    seconds = run.chunks["arrived_ns"] // 1_000_000_000
    busiest = int(np.bincount(seconds).max()) if len(seconds) else 0
    text = f"{busiest} messages in one second, of {ceiling:g} this host can measure: latencies may be the client's own"
    return bounded(check, title, busiest / ceiling, limits.ceiling_share, "share", text)


def _both(bounds: Bounds) -> tuple[float, float]:
    return bounds.degraded, float("inf") if bounds.invalid is None else bounds.invalid
