"""result.json: everything about a run except its single requests.

Pure. `templates/result.schema.json`, a JSON Schema (draft 2020-12), says what each key is; it travels with the package.
"""

from dataclasses import fields
from typing import Any

from loadgen.causes import Cause, causes_of, refusals_of
from loadgen.checks.selfcheck import Verdict
from loadgen.measure.class_goodput import ClassGoodput
from loadgen.measure.metrics import Latencies, Metrics, Part
from loadgen.measure.quantiles import Distribution, distribution
from loadgen.measure.samples import Samples
from loadgen.measure.timeseries import timeseries
from loadgen.plain_json import plain
from loadgen.record import RunData
from loadgen.report.flat import flat_keys
from loadgen.trace.oracle import ideal_cached_tokens
from loadgen.trace.schema import workload_digest
from loadgen.trace.stats import ArrivalStatistics

SCHEMA = "loadgen.result/v1"
_SERVICE = ("service_ttft", "service_e2e", "client_wait", "server_queued", "server_prefill", "elsewhere")


def result_document(run: RunData, metrics: Metrics, verdict: Verdict, samples: Samples) -> dict[str, Any]:
    """Everything result.json holds: finite numbers, texts, lists and objects."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        **flat_keys(run, metrics),
        "verdict": {
            "level": verdict.level,
            "partial": verdict.partial,
            "reasons": [finding.sentence for finding in verdict.reasons],
        },
        "selfcheck": [
            {
                "check": finding.check,
                "title": finding.title,
                "level": finding.level,
                "measured": finding.measured,
                "degraded_above": None if finding.bounds is None else finding.bounds.degraded,
                "invalid_above": None if finding.bounds is None else finding.bounds.invalid,
                "unit": finding.unit,
                "text": finding.text,
            }
            for finding in verdict.findings
        ],
        "run": {"settings": run.settings, "interrupted": run.interrupted, "ended_s": run.ended_s},
        "workload": _workload(run, metrics),
        "window": {**metrics.steady.span._asdict(), "warmup_s": metrics.options.warmup_s},
        **_part(metrics.steady),
        "whole_run": _part(metrics.whole),
        "tokens": {**plain(metrics.tokens), "achieved_share": metrics.tokens.achieved_share},
        "cache": _cache(metrics),
        "timeseries": timeseries(run, samples),
        "errors": _counted(causes_of(run)),
        "refusals": _counted(refusals_of(run)),
        "server_metrics": None
        if run.server_metrics is None
        else dict(zip(("before", "after"), run.server_metrics, strict=True)),
    }
    return {key: plain(value) for key, value in document.items()}


def _part(part: Part) -> dict[str, Any]:
    latencies = {one.name: getattr(part.latencies, one.name) for one in fields(Latencies)}
    return {
        "counts": part.counts,
        "metrics": {f"{name}_ms": _summary(one) for name, one in latencies.items() if name not in _SERVICE},
        "service_metrics": {f"{name}_ms": _summary(one) for name, one in latencies.items() if name in _SERVICE},
        "throughput": {**plain(part.throughput), "total_tokens_per_s": part.throughput.total_tokens_per_s},
        "interactivity_tokens_per_s": part.interactivity,
        "slo": {**plain(part.goodput), "attainment": part.goodput.attainment},
        "service_classes": [_of_class(one) for one in part.classes],
    }


def _of_class(one: ClassGoodput) -> dict[str, Any]:
    return {
        **plain(one),
        "met_share": one.met_share,
        "retries_met_share": one.retries_met_share,
        "ttft": _summary(one.ttft),
        "itl": _summary(one.itl),
    }


def _summary(one: Distribution) -> dict[str, float]:
    figures = {"n": one.n, "mean": one.mean, "std": one.std, "min": one.min, "max": one.max}
    return {**figures, **{f"p{percentile:g}": value for percentile, value in one.percentiles}}


def _workload(run: RunData, metrics: Metrics) -> dict[str, Any]:
    trace = run.workload
    ideal = ideal_cached_tokens(trace).sum() / trace.input_tokens.sum() if len(trace) else float("nan")
    percentiles = metrics.options.percentiles
    return {
        "name": trace.name,
        "format": trace.format,
        "digest": trace.digest,
        "workload_digest": workload_digest(trace),
        "rows_read": trace.accounting.read,
        "rows_dropped": trace.accounting.dropped,
        "rows_altered": trace.accounting.altered,
        "speed": trace.speed,
        "requests": len(trace),
        "input_tokens": _summary(distribution(trace.input_tokens.astype(float), percentiles)),
        "output_tokens": _summary(distribution(trace.output_tokens.astype(float), percentiles)),
        "ideal_cached_share": ideal,
        "planned": _schedule(metrics.planned),
        "played": _schedule(metrics.played),
    }


def _schedule(shape: ArrivalStatistics | None) -> dict[str, Any] | None:
    if shape is None:
        return None
    bursts = {f"{bin_s}s": burst for bin_s, burst in shape.bursts.items()}
    return {
        "count": shape.count,
        "span_s": shape.span_s,
        "rate_per_s": shape.mean_rate_rps,
        "gap_cv": shape.gap_cv,
        "idc": {width: burst.idc for width, burst in bursts.items()},
        "peak_to_mean": {width: burst.peak_to_mean for width, burst in bursts.items()},
    }


def _cache(metrics: Metrics) -> dict[str, Any] | None:
    if metrics.cache is None:
        return None
    return {**plain(metrics.cache), "share": metrics.cache.share, "ideal_share": metrics.cache.ideal_share}


def _counted(causes: list[Cause]) -> list[dict[str, Any]]:
    """Texts of causes and their numbers of requests."""
    return [{"text": cause.text, "count": cause.num_requests} for cause in causes]
