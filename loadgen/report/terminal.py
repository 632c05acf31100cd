"""The summary after a run: the verdict and its reasons first, then figures laid out as people know them from vLLM."""

from pathlib import Path
from textwrap import wrap

from rich.console import Console
from rich.text import Text

from loadgen.causes import Cause, causes_of, refusals_of
from loadgen.checks.finding import Level
from loadgen.checks.selfcheck import Verdict
from loadgen.measure.metrics import Metrics
from loadgen.record import RunData
from loadgen.report.figures import milliseconds
from loadgen.report.rows import (
    CLASS_COLUMNS,
    Fact,
    class_rows,
    goodput_facts,
    is_interesting,
    latency_rows,
    outcome_facts,
    percentile_columns,
    retry_facts,
    schedule_facts,
    throughput_facts,
    window_text,
)

STYLES: dict[Level, str] = {"VALID": "bold green", "DEGRADED": "bold yellow", "INVALID": "bold red"}
MEANING: dict[Level, str] = {
    "VALID": "the figures may be quoted",
    "DEGRADED": "quote the figures together with the reasons",
    "INVALID": "the figures are not the server's: do not quote them",
}
_MAX_CAUSES = 3
_WIDTH, _NAME_WIDTH, _FIGURE_WIDTH = 80, 30, 8


def print_summary(
    console: Console, run: RunData, metrics: Metrics, verdict: Verdict, folder: Path | None = None
) -> None:
    """Prints a run; `folder` is where the rest of it is, if anywhere."""
    for line in summary(run, metrics, verdict, folder):
        console.print(line, soft_wrap=True)


def summary(run: RunData, metrics: Metrics, verdict: Verdict, folder: Path | None = None) -> list[Text]:
    """The lines of the summary, at most about 80 wide but for what users named themselves."""
    lines = [_rule("Load generator result", "=")]
    lines += verdict_lines(verdict)
    if run.interrupted:
        lines.append(Text("PARTIAL: the run was stopped before its end", style=STYLES["DEGRADED"]))
    lines += [_fact(fact) for fact in outcome_facts(run, metrics)]
    lines += _cause_lines("Why requests failed:", causes_of(run))
    lines += _cause_lines("Why requests were refused:", refusals_of(run))
    lines.append(_rule(f"Window: {window_text(metrics)}", "-"))
    lines += [_fact(fact) for fact in throughput_facts(metrics)]
    if facts := goodput_facts(metrics):
        lines.append(_rule("Goodput", "-"))
        lines += [_fact(fact) for fact in facts]
    lines += _class_lines(metrics)
    lines.append(_rule("Latency (ms)", "-"))
    lines += _latency_lines(metrics)
    lines.append(_rule("Schedule", "-"))
    lines += [_fact(fact) for fact in schedule_facts(run, metrics)]
    lines.append(Text("=" * _WIDTH))
    if folder is not None:
        lines.append(Text(f"Results: {folder}"))
    return lines


def verdict_lines(verdict: Verdict) -> list[Text]:
    """The verdict, then a line per reason with the figure, its limit and what to do."""
    lines = [Text.assemble((verdict.level, STYLES[verdict.level]), f": {MEANING[verdict.level]}")]
    for finding in verdict.reasons:
        first, *rest = wrap(f"{finding.level} {finding.sentence}", _WIDTH - 4)
        lines.append(Text.assemble("  ", (finding.level, STYLES[finding.level]), first.removeprefix(finding.level)))
        lines += [Text(f"    {line}") for line in rest]
    for finding in verdict.notes:
        lines += [Text(f"  {line}") for line in wrap(f"Note: {finding.text}", _WIDTH - 4, subsequent_indent="  ")]
    return lines


def _cause_lines(title: str, causes: list[Cause]) -> list[Text]:
    """The most frequent causes; nothing without any."""
    lines = [Text(title)] if causes else []
    for cause in causes[:_MAX_CAUSES]:
        lines += [
            Text(f"  {line}")
            for line in wrap(f"{cause.num_requests:,} x {cause.text}", _WIDTH - 4, subsequent_indent="  ")
        ]
    if len(causes) > _MAX_CAUSES:
        others = len(causes) - _MAX_CAUSES
        lines.append(Text(f"  and {others:,} other cause{'s' * (others > 1)}, see the report"))
    return lines


def _latency_lines(metrics: Metrics) -> list[Text]:
    columns = percentile_columns(metrics)
    heads = ["mean", *(f"p{percentile:g}" for percentile in columns), "max"]
    name_width = _WIDTH - _FIGURE_WIDTH * len(heads)
    lines = [Text(" " * max(name_width, 20) + "".join(head.rjust(_FIGURE_WIDTH) for head in heads), style="bold")]
    for row in latency_rows(metrics.steady):
        if not is_interesting(row):
            continue
        values = [row.figures.mean, *(row.figures.at(percentile) for percentile in columns), row.figures.max]
        figures = "".join(milliseconds(value).rjust(_FIGURE_WIDTH) for value in values)
        lines.append(Text(row.name.ljust(max(name_width, 20)) + figures))
    return lines


def _class_lines(metrics: Metrics) -> list[Text]:
    rows = class_rows(metrics)
    if not rows:
        return []
    width = (_WIDTH - 16) // len(CLASS_COLUMNS)
    table = [(" " * 16, CLASS_COLUMNS), *((row.name.ljust(16), row.cells) for row in rows)]
    lines = [Text(name + "".join(cell.rjust(max(width, len(cell) + 1)) for cell in cells)) for name, cells in table]
    lines[0].stylize("bold")
    return [_rule("Goodput by class", "-"), *lines, *map(_fact, retry_facts(metrics))]


def _fact(fact: Fact) -> Text:
    return Text(f"{fact.name + ':':<{_NAME_WIDTH}}{fact.value}")


def _rule(title: str, character: str) -> Text:
    return Text(f" {title} ".center(_WIDTH, character))
