"""The tables every report shows, as names and figures; terminal and page lay them out, each its own way. Pure."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from loadgen.measure.metrics import Metrics, Part
from loadgen.measure.quantiles import Distribution
from loadgen.record import RunData
from loadgen.report.figures import number, share

_SLO_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def limits_text(slo: Mapping[str, float]) -> str:
    """Returns latency limits as text, such as "TTFT 500 ms, TPOT 50 ms"."""
    return ", ".join(f"{_SLO_NAMES[name]} {limit_ms:g} ms" for name, limit_ms in slo.items())


class LatencyRow(NamedTuple):
    """One line of the latency table. `note` says what is measured, in a few words."""

    name: str
    note: str
    figures: Distribution


class Fact(NamedTuple):
    """A name and its figure, ready to show."""

    name: str
    value: str


def latency_rows(part: Part) -> list[LatencyRow]:
    """Latencies in ms, those without a sample left out."""
    latencies = part.latencies
    rows = [
        LatencyRow("TTFT", "due to first token", latencies.ttft),
        LatencyRow("TTFT, from sending", "sent to first token", latencies.service_ttft),
        LatencyRow("TPOT", "per token after the first, one value per request", latencies.tpot),
        LatencyRow("ITL", "gaps per token, one value per token", latencies.itl),
        LatencyRow("Chunk gap", "between messages", latencies.chunk_gap),
        LatencyRow("Longest stall", "longest gap of each request", latencies.max_stall),
        LatencyRow("E2E", "due to last token", latencies.e2e),
        LatencyRow("E2E, from sending", "sent to last token", latencies.service_e2e),
        LatencyRow("Normalized", "E2E over tokens of the answer", latencies.normalized),
        LatencyRow("Wait in the client", "of TTFT: due to sent", latencies.client_wait),
        LatencyRow("Queued in the server", "of TTFT: by its own account", latencies.server_queued),
        LatencyRow("Prefill", "of TTFT: by its own account", latencies.server_prefill),
        LatencyRow("Elsewhere", "of TTFT, the rest: network, streams, event loops", latencies.elsewhere),
    ]
    return [row for row in rows if row.figures.n]


def outcome_facts(run: RunData, metrics: Metrics) -> list[Fact]:
    """What became of the requests, over the whole run; outcomes that did not occur are left out but for errors."""
    counts = metrics.whole.counts
    facts = [Fact("Requests answered", f"{counts.ok:,} of {counts.offered:,}"), Fact("Errors", f"{counts.error:,}")]
    for name, count in {
        "Refused for their targets": counts.refused,
        "Timeouts": counts.timeout,
        "Cancelled on purpose": counts.cancelled,
        "Dropped at --max-concurrency": counts.dropped,
        "Unfinished": counts.in_flight,
        "Never sent": counts.unsent,
    }.items():
        if count:
            facts.append(Fact(name, f"{count:,}"))
    facts.append(Fact("Duration (s)", number(run.ended_s)))
    facts.append(Fact("Output tokens", f"{metrics.tokens.achieved_output:,} of {metrics.tokens.requested_output:,}"))
    if metrics.tokens.server_input:
        facts.append(Fact("Prompt tokens", f"{metrics.tokens.server_input:,} of {metrics.tokens.planned_input:,}"))
    if metrics.cache is not None:
        text = f"{share(metrics.cache.share)}, ideal {share(metrics.cache.ideal_share)}"
        facts.append(Fact("Prompt tokens found in cache", text))
    return facts


def throughput_facts(metrics: Metrics) -> list[Fact]:
    """Rates of the measured window."""
    throughput = metrics.steady.throughput
    facts = [
        Fact("Requests (per s)", number(throughput.requests_per_s)),
        Fact("Output tokens (per s)", number(throughput.output_tokens_per_s)),
        Fact("Peak output tokens (per s)", number(throughput.peak_output_tokens_per_s)),
        Fact("Total tokens (per s)", number(throughput.total_tokens_per_s)),
        Fact("In flight, mean and peak", f"{number(throughput.mean_in_flight)}, {throughput.peak_in_flight:,}"),
        Fact("Tokens/s per user, median", number(metrics.steady.interactivity)),
    ]
    if throughput.mean_waiting >= 0.05:
        facts.append(Fact("Waiting to be sent, mean", number(throughput.mean_waiting)))
    return facts


def goodput_facts(metrics: Metrics) -> list[Fact]:
    """SLO attainment in the window and over everything offered, and goodput; empty without limits."""
    goodput = metrics.steady.goodput
    if not goodput.limits_ms:
        return []
    facts = [
        Fact("Limits", limits_text(goodput.limits_ms)),
        Fact("SLO attainment", f"{share(goodput.attainment)}, {goodput.good:,} of {goodput.offered:,} offered"),
        *(Fact(f"SLO attainment, {_SLO_NAMES[name]}", share(kept)) for name, kept in goodput.kept.items()),
        Fact("Good requests (per s)", number(goodput.requests_per_s)),
    ]
    if metrics.steady is not metrics.whole:
        facts.append(Fact("SLO attainment, whole run", share(metrics.whole.goodput.attainment)))
    return facts


class ClassRow(NamedTuple):
    """Goodput of a service class, ready to show."""

    name: str
    cells: tuple[str, ...]


CLASS_COLUMNS = ("offered", "met", "at retry", "late", "refused", "failed", "good/s", "tok/s")


def class_rows(metrics: Metrics) -> list[ClassRow]:
    """Requests of the window by class and by what became of their targets; empty without classes."""
    return [
        ClassRow(
            one.name,
            (
                *(
                    f"{count:,}"
                    for count in (one.offered, one.met, one.met_at_retry, one.late, one.refused, one.failed)
                ),
                number(one.good_requests_per_s),
                number(one.good_tokens_per_s),
            ),
        )
        for one in metrics.steady.classes
    ]


def retry_facts(metrics: Metrics) -> list[Fact]:
    """Refused requests that were sent again at the time that the server named, and their share that met its targets;
    empty without any.
    """
    classes = metrics.steady.classes
    came_back, met = sum(one.came_back for one in classes), sum(one.retries_met for one in classes)
    return [Fact("Retried when told", f"{came_back:,}, {share(met / came_back)} met targets")] if came_back else []


def schedule_facts(run: RunData, metrics: Metrics) -> list[Fact]:
    """Returns the planned schedule and the one that was sent; first the rate that was requested."""
    facts = [] if metrics.planned is not None else [Fact("Arrivals", "when another request ended (closed loop)")]
    if asked := run.settings.get("asked_rate_per_s"):
        facts.append(Fact("Arrivals requested", f"{number(asked)} per s; the plan is a random draw"))
    for name, shape in (("planned", metrics.planned), ("sent", metrics.played)):
        if shape is None:
            continue
        rate = "all at once" if shape.mean_rate_rps is None else f"{number(shape.mean_rate_rps)} per s"
        gap_cv = "" if shape.gap_cv is None else f", gap CV {shape.gap_cv:.2f}"
        idc = f", IDC 1 s {shape.bursts[1].idc:.2f}" if 1 in shape.bursts else ""
        facts.append(Fact(f"Arrivals {name}", f"{rate}{gap_cv}{idc}"))
    return facts


def window_text(metrics: Metrics) -> str:
    """Which part of the run is measured."""
    span = metrics.steady.span
    if not span.steady:
        return f"the whole run, {number(span.duration_s)} s, ramp and drain included"
    begin = f"after {span.start_s:g} s of warm-up" if span.start_s else "from the start"
    return f"{begin} to the last arrival, {number(span.duration_s)} s"


def percentile_columns(metrics: Metrics) -> list[float]:
    """The percentiles that were asked for, and 50 and 99."""
    return [percentile for percentile, _ in metrics.steady.latencies.ttft.percentiles]


def is_interesting(row: LatencyRow) -> bool:
    """Whether a row is worth a line: all but a wait in the client of less than a tenth of a millisecond."""
    return not (row.name == "Wait in the client" and (math.isnan(row.figures.max) or row.figures.max < 0.1))
