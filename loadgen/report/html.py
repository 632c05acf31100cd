"""The report as one page that needs nothing else: readable on a phone, in the dark, by a screen reader, years later."""

import shlex
from collections.abc import Sequence
from typing import NamedTuple

from loadgen.causes import causes_of, refusals_of
from loadgen.checks.selfcheck import Verdict
from loadgen.measure.metrics import Metrics
from loadgen.measure.quantiles import Distribution
from loadgen.record import RunData
from loadgen.report.figures import milliseconds, number, share
from loadgen.report.folder import page
from loadgen.report.plot_style import Picture
from loadgen.report.rows import (
    CLASS_COLUMNS,
    Fact,
    class_rows,
    goodput_facts,
    latency_rows,
    outcome_facts,
    percentile_columns,
    retry_facts,
    schedule_facts,
    throughput_facts,
    window_text,
)
from loadgen.report.settings_text import settings_facts
from loadgen.report.terminal import MEANING
from loadgen.trace.schema import workload_digest


class Tile(NamedTuple):
    """A figure to see at a glance."""

    name: str
    value: str
    unit: str
    note: str = ""


def run_page(run: RunData, metrics: Metrics, verdict: Verdict, drawn: Sequence[Picture]) -> str:
    """Returns the page of a run."""
    return page(
        "report.html.j2",
        drawn,
        title=_title(run),
        subtitle=_subtitle(run),
        command=_command(run),
        run=run,
        verdict=verdict,
        meaning=MEANING[verdict.level],
        tiles=_tiles(metrics),
        window=window_text(metrics),
        columns=percentile_columns(metrics),
        latency_rows=latency_rows(metrics.steady),
        parts_add_up=0 < metrics.steady.latencies.elsewhere.n == metrics.steady.latencies.ttft.n,
        whole_latency_rows=latency_rows(metrics.whole),
        throughput=throughput_facts(metrics),
        outcomes=outcome_facts(run, metrics),
        goodput=goodput_facts(metrics),
        class_columns=CLASS_COLUMNS,
        class_rows=class_rows(metrics),
        retries=retry_facts(metrics),
        workload=[*_workload_facts(run), *schedule_facts(run, metrics)],
        causes={"Errors": causes_of(run), "Refusals for latency targets": refusals_of(run)},
        settings=settings_facts(run.settings),
    )


def _title(run: RunData) -> str:
    model = run.settings.get("model") or run.settings.get("target") or "a server"
    return f"{run.workload.name} against {model}"


def _subtitle(run: RunData) -> str:
    loop = "closed loop" if run.settings.get("closed_loop") else "open loop, latency from the scheduled time"
    cap = run.settings.get("max_concurrency")
    known = [
        run.settings.get("time") or run.settings.get("started_at"),
        run.settings.get("target"),
        loop,
        f"at most {cap} in flight" if cap else None,
    ]
    return " · ".join(str(one) for one in known if one)


def _command(run: RunData) -> str:
    command = run.settings.get("command") or ""
    return command if isinstance(command, str) else shlex.join(map(str, command))


def _tiles(metrics: Metrics) -> list[Tile]:
    latencies, throughput = metrics.steady.latencies, metrics.steady.throughput
    tiles = [
        _latency_tile("TTFT", latencies.ttft),
        _latency_tile("TPOT", latencies.tpot),
        _latency_tile("E2E", latencies.e2e),
        Tile(
            "Output", number(throughput.output_tokens_per_s), "tok/s", f"{number(throughput.requests_per_s)} requests/s"
        ),
    ]
    goodput = metrics.steady.goodput
    if goodput.limits_ms:
        tiles.append(Tile("Within all limits", share(goodput.attainment), "", f"of {goodput.offered:,} offered"))
    counts = metrics.whole.counts
    lost = counts.offered - counts.ok - counts.cancelled
    tiles.append(Tile("Answered", f"{counts.ok:,}", f"of {counts.offered:,}", f"{lost:,} not answered" if lost else ""))
    return tiles


def _latency_tile(name: str, figures: Distribution) -> Tile:
    return Tile(f"{name} p50", milliseconds(figures.p50), "ms", f"p99 {milliseconds(figures.p99)} ms")


def _workload_facts(run: RunData) -> list[Fact]:
    trace = run.workload
    left_out = {**trace.accounting.dropped, **trace.accounting.altered}
    lengths = {"Prompt": trace.input_tokens, "Answer": trace.output_tokens} if len(trace) else {}
    return [
        Fact("Name", trace.name),
        Fact("Format", trace.format),
        Fact("Requests", f"{len(trace):,}"),
        *(
            Fact(f"{name} tokens, mean and most", f"{number(tokens.mean())}, {tokens.max():,}")
            for name, tokens in lengths.items()
        ),
        Fact("Rows read", f"{trace.accounting.read:,}"),
        *(Fact(f"Rows {reason}", f"{count:,}") for reason, count in left_out.items()),
        Fact("Digest of the workload", workload_digest(trace)[:16]),
    ]
