"""Checks of the server: planned lengths, a cold cache, a steady state, requests enough for the percentiles. Pure."""

import math

import numpy as np

from loadgen.checks.finding import Finding, bounded, not_judged, yes_or_no
from loadgen.checks.limits import Limits
from loadgen.checks.remedies import remedy
from loadgen.checks.saturation import saturation
from loadgen.checks.shortage import what_held_back
from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples
from loadgen.record import ABSENT, RunData

_FEW = 0.1
_TPOT_OFF = 0.05
_LONG_TOKENS = 16  # a fast server may send fewer in one message
_AT_ONCE_MS = 0.1  # per token: several times as fast as any model answers


def server_checks(run: RunData, metrics: Metrics, samples: Samples, limits: Limits) -> tuple[Finding, ...]:
    """Returns all findings, passed or not."""
    return (
        _answered(metrics),
        _errors(run, metrics, limits),
        _in_flight(run, samples, limits),
        _input_tokens(run, metrics, limits),
        _output_tokens(run, metrics, limits),
        _streaming(samples),
        _token_counts(run, samples),
        _cache(run, metrics, limits),
        _steady(run, metrics),
        _saturation(run, metrics, samples),
        _tail(metrics),
    )


def _answered(metrics: Metrics) -> Finding:
    counts = metrics.whole.counts
    text = "" if counts.ok else f"none of {counts.offered} requests was answered: see the errors"
    return yes_or_no("answered", "requests answered", "INVALID", text)


def _errors(run: RunData, metrics: Metrics, limits: Limits) -> Finding:
    counts = metrics.whole.counts
    unfinished = 0 if run.interrupted else counts.in_flight  # stopping leaves some by itself
    failed = counts.error + counts.timeout + unfinished
    numbers = {"error": counts.error, "timeout": counts.timeout, "unfinished request": unfinished}
    what = ", ".join(f"{number} {name}{'s' * (number > 1)}" for name, number in numbers.items() if number)
    text = f"{what}: latencies are of those that came through; {remedy(run, unfinished)}" if failed else ""
    sent = counts.offered - counts.unsent - counts.dropped
    share = failed / sent if sent else float("nan")
    return bounded("errors", "errors, timeouts and unfinished", share, limits.error_share, "share", text)


def _in_flight(run: RunData, samples: Samples, limits: Limits) -> Finding:
    """Little's law: the mean number in flight is the time spent, by each side's account, over the same duration.

    Not judged where the median request spent little time outside: a cap holds back more than a few, while a server that
    once stops altogether does not note it in its own account either.
    """
    check, title = "in_flight", "client and server disagree on how many requests were in flight, by"
    reported = samples.completed & ~np.isnan(samples.server_queued) & ~np.isnan(samples.server_prefill)
    if not reported.any():
        return not_judged(check, title, limits.in_flight_off, "share", "the server does not say how long it had them")
    client_ms = samples.service_e2e[reported]
    decode_ms = client_ms - samples.service_ttft[reported]
    server_ms = samples.server_queued[reported] + samples.server_prefill[reported] + decode_ms
    off = abs(1.0 - float(server_ms.sum() / client_ms.sum()))
    outside_ms = abs(float(np.median(client_ms - server_ms)))
    if outside_ms <= limits.in_flight_floor_ms:
        why = f"{outside_ms:.1f} ms (median) are hardly more than the network's round trip"
        return not_judged(check, title, limits.in_flight_off, "share", why)
    text = f"requests spent {outside_ms:.0f} ms (median) on the way: {what_held_back(run)}"
    return bounded(check, title, off, limits.in_flight_off, "share", text)


def _input_tokens(run: RunData, metrics: Metrics, limits: Limits) -> Finding:
    """From the server's counts; where there are none, from the probe of text prompts."""
    off = metrics.tokens.input_off
    if math.isnan(off):
        off = (run.settings.get("text_prompts") or {}).get("mismatch", math.nan)
    text = "the server counts other lengths than were planned: send token ids, or check its chat template"
    return bounded("input_tokens", "prompt tokens off the plan", off, limits.input_tokens_off, "share", text)


def _output_tokens(run: RunData, metrics: Metrics, limits: Limits) -> Finding:
    check, title = "output_tokens", "output tokens off the plan"
    if not run.settings.get("ignore_eos", True):
        return not_judged(
            check, title, limits.output_tokens_off, "share", "answers may end by themselves (--no-ignore-eos)"
        )
    text = (
        f"{metrics.tokens.achieved_output} of {metrics.tokens.requested_output} requested tokens came: the server must "
        "heed ignore_eos and max_tokens, or has a shorter context"
    )
    return bounded(check, title, metrics.tokens.output_off, limits.output_tokens_off, "share", text)


def _streaming(samples: Samples) -> Finding:
    """Notes answers that came whole, and first messages of several tokens, which TPOT counts as later ones."""
    texts = []
    long = samples.completed & (samples.num_tokens >= _LONG_TOKENS)
    at_once = int((long & ((samples.num_chunks == 1) | (samples.tpot < _AT_ONCE_MS))).sum())
    if at_once > _FEW * long.sum():
        texts.append(
            f"{at_once:,} of {long.sum():,} answers of {_LONG_TOKENS} tokens or more came at once: in one message they "
            "have no TPOT and ITL, and they keep all such limits; the server or a proxy before it does not stream "
            "them, or the client was short of CPU"
        )
    gaps = samples.gaps
    later = np.bincount(gaps.request, weights=gaps.tokens, minlength=len(long))
    timed = samples.completed & (samples.num_tokens >= 2) & (later > 0)
    first = (samples.num_tokens - later)[timed]
    if len(first) and (below := float(((first - 1) / (samples.num_tokens[timed] - 1)).mean())) > _TPOT_OFF:
        texts.append(
            f"first messages hold {first.mean():.1f} tokens on average: TPOT counts all but one of them as later ones "
            f"and is {below:.0%} below the time per token; ITL is not"
        )
    return yes_or_no("streaming", "answers streamed token by token", "VALID", "; ".join(texts))


def _token_counts(run: RunData, samples: Samples) -> Finding:
    """Notes answers that nobody counted: with a fixed length a wrong count shows as `output_tokens`."""
    uncounted = samples.completed & (run.requests["server_output_tokens"] == ABSENT)
    text = ""
    if uncounted.any() and not run.settings.get("ignore_eos", True):
        text = (
            f"the server does not say how many tokens {uncounted.sum():,} answers have; a message that does not say so "
            "either counts as one token: if it holds more, tokens per second are higher, and TPOT and ITL lower"
        )
    return yes_or_no("token_counts", "tokens of answers counted by the server", "VALID", text)


def _cache(run: RunData, metrics: Metrics, limits: Limits) -> Finding:
    check, title = "cache", "cached prompt tokens beyond the workload's own sharing"
    if metrics.cache is None:
        return not_judged(check, title, limits.cache_above_ideal, "share", "the server does not say what it had cached")
    mend = (
        "the salt was pinned: restart the server, or do not pin it" if run.settings.get("pinned_salt") else "restart it"
    )
    text = (
        f"{metrics.cache.share:.1%} of prompt tokens were cached, the workload shares {metrics.cache.ideal_share:.1%}: "
        f"the server knew these prompts before; {mend}"
    )
    return bounded(check, title, metrics.cache.above_ideal, limits.cache_above_ideal, "share", text)


def _steady(run: RunData, metrics: Metrics) -> Finding:
    title = "steady-state window"
    if metrics.steady.span.steady:
        return yes_or_no("steady_state", title, "VALID", "")
    warmup_s = metrics.options.warmup_s
    if warmup_s and warmup_s >= run.workload.span_s:
        text = f"a warm-up of {warmup_s:g} s leaves nothing of the schedule: measured is the whole run"
        return yes_or_no("steady_state", title, "DEGRADED", text)
    text = "arrivals were over before the server had filled up: figures are of the whole run, ramp and drain included"
    return yes_or_no("steady_state", title, "VALID", text)


def _saturation(run: RunData, metrics: Metrics, samples: Samples) -> Finding:
    check, title = "saturation", "load and latency steady"
    if run.settings.get("closed_loop"):
        return not_judged(check, title, None, "", "a closed loop cannot build a queue")
    found = saturation(run, samples, metrics.steady.span)
    if found is None:
        return not_judged(check, title, None, "", "too few requests to see a trend")
    text = (
        f"unstable: latency depends on duration. Over the window, requests in the system rose by "
        f"{found.in_system.rise:.0%} of their mean, TTFT by {found.ttft.rise:.0%}: lower the rate"
    )
    return yes_or_no(check, title, "DEGRADED", text if found.unstable else "")


def _tail(metrics: Metrics) -> Finding:
    """Notes percentiles beyond which not even one request is expected: interpolated, they are nearly the extreme."""
    ttft = metrics.steady.latencies.ttft
    needed = {p: math.ceil(round(100 / min(p, 100 - p), 6)) for p, _ in ttft.percentiles}
    sparse = [f"p{percentile:g}" for percentile, requests in needed.items() if 0 < ttft.n < requests]
    text = ""
    if sparse:
        text = (
            f"{ttft.n:,} answered requests in the window are too few for {', '.join(sparse)}: hardly more than the "
            f"extreme value; {max(needed.values()):,} are needed"
        )
    return yes_or_no("tail", "requests enough for the percentiles", "VALID", text)
