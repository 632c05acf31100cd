"""The report as one page that needs nothing else: readable on a phone, in the dark, by a screen reader, years later."""

import shlex
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadgen.checks.selfcheck import Verdict
from loadgen.measure.metrics import Metrics
from loadgen.measure.quantiles import Distribution
from loadgen.record import RunData
from loadgen.report.figures import milliseconds, number, share
from loadgen.report.plot_style import Picture, svg
from loadgen.report.result import errors_by_number
from loadgen.report.rows import (
    Fact,
    goodput_facts,
    latency_rows,
    outcome_facts,
    percentile_columns,
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


def page(run: RunData, metrics: Metrics, verdict: Verdict, drawn: Sequence[Picture]) -> str:
    """The page as text; whatever users or servers named is escaped."""
    environment = Environment(
        loader=PackageLoader("loadgen.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    environment.filters["ms"] = milliseconds
    text = environment.get_template("report.html.j2").render(
        title=_title(run),
        subtitle=_subtitle(run),
        command=_command(run),
        css=Markup((files("loadgen.report") / "templates" / "report.css").read_text(encoding="utf-8")),
        run=run,
        verdict=verdict,
        meaning=MEANING[verdict.level],
        tiles=_tiles(metrics),
        window=window_text(metrics),
        pictures=[(picture, Markup(svg(picture))) for picture in drawn],
        columns=percentile_columns(metrics),
        latency_rows=latency_rows(metrics.steady),
        parts_add_up=0 < metrics.steady.latencies.elsewhere.n == metrics.steady.latencies.ttft.n,
        whole_latency_rows=latency_rows(metrics.whole),
        throughput=throughput_facts(metrics),
        outcomes=outcome_facts(run, metrics),
        goodput=goodput_facts(metrics),
        workload=[*_workload_facts(run), *schedule_facts(run, metrics)],
        errors=errors_by_number(run),
        settings=settings_facts(run.settings),
    )
    return f"{text.strip()}\n"


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
    facts = [
        Fact("Name", trace.name),
        Fact("Format", trace.format),
        Fact("Requests", f"{len(trace):,}"),
        Fact("Rows read", f"{trace.accounting.read:,}"),
        *(Fact(f"Rows {reason}", f"{count:,}") for reason, count in left_out.items()),
        Fact("Digest of the workload", workload_digest(trace)[:16]),
    ]
    if len(trace):
        facts.insert(
            3,
            Fact("Prompt tokens, mean and most", f"{number(trace.input_tokens.mean())}, {trace.input_tokens.max():,}"),
        )
        facts.insert(
            4,
            Fact(
                "Answer tokens, mean and most", f"{number(trace.output_tokens.mean())}, {trace.output_tokens.max():,}"
            ),
        )
    return facts
