"""The flat keys that vLLM's serving benchmark writes, so that its dashboards and scripts can read our results.

Pure. Names are its own; the figures are ours, and differ from its where the definitions do: latencies count from when a
request was due, rates are of the steady-state window, and `itl` counts a gap once per token. Counts, token totals and
`duration` are of the whole run, as there. What is only ours is nested beside these keys.
"""

from typing import Any

import numpy as np

from loadgen.measure.metrics import Metrics
from loadgen.measure.quantiles import Distribution
from loadgen.record import ABSENT, RunData, Status


def flat_keys(run: RunData, metrics: Metrics) -> dict[str, Any]:
    """Key to figure; NaN where there is none."""
    counts, latencies, throughput = metrics.whole.counts, metrics.steady.latencies, metrics.steady.throughput
    rate = None if metrics.planned is None else metrics.planned.mean_rate_rps
    reported, completed = run.requests["server_input_tokens"], run.requests["status"] == Status.OK
    keys: dict[str, Any] = {
        "date": run.settings.get("time") or run.settings.get("started_at"),
        "backend": run.settings.get("api"),
        "model_id": run.settings.get("model"),
        "num_prompts": len(run.requests),
        "request_rate": None if metrics.planned is None else "inf" if rate is None else rate,
        "max_concurrency": run.settings.get("concurrency") or run.settings.get("max_concurrency"),
        "duration": run.ended_s,
        "completed": counts.ok,
        "failed": counts.offered - counts.ok - (counts.unsent + counts.in_flight if run.interrupted else 0),
        "total_input_tokens": int(np.where(reported == ABSENT, run.workload.input_tokens, reported)[completed].sum()),
        "total_output_tokens": metrics.tokens.achieved_output,
        "request_throughput": throughput.requests_per_s,
        "request_goodput": metrics.steady.goodput.requests_per_s if metrics.options.slo else None,
        "output_throughput": throughput.output_tokens_per_s,
        "total_token_throughput": throughput.total_tokens_per_s,
        "max_output_tokens_per_s": throughput.peak_output_tokens_per_s,
        "max_concurrent_requests": throughput.peak_in_flight,
    }
    for name, distribution in {
        "ttft": latencies.ttft,
        "tpot": latencies.tpot,
        "itl": latencies.itl,
        "e2el": latencies.e2e,
    }.items():
        keys.update(_of(name, distribution))
    return keys


def _of(name: str, distribution: Distribution) -> dict[str, float]:
    keys = {
        f"mean_{name}_ms": distribution.mean,
        f"median_{name}_ms": distribution.p50,
        f"std_{name}_ms": distribution.std,
    }
    keys.update({f"p{percentile:g}_{name}_ms": value for percentile, value in distribution.percentiles})
    return keys
