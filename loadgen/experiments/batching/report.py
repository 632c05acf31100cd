"""The experiment's results as text, as pictures, as one self-contained page, and as raw samples."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadgen.experiments.batching.case_run import CaseRun
from loadgen.experiments.batching.charts import draw_latencies, draw_ratios, draw_step_cost, draw_sweep
from loadgen.experiments.batching.experiment import SweepPoint
from loadgen.experiments.batching.findings import findings, sweep_findings, sweep_title
from loadgen.experiments.batching.policies import CONTINUOUS, STATIC
from loadgen.experiments.batching.results import CaseResult, Row, table
from loadgen.experiments.batching.timelines import draw_timelines
from loadgen.report.folder import page, write_folder
from loadgen.report.plot_style import Picture

_CAPTIONS = {
    "ratios": "Steps are the scheduler's, time is the machine's: the two differ by what a step costs.",
    "cost": "What a step costs by the requests in it, steps with prompts left out.",
    "slots": "Slot occupancy by step, from the engine's step log. One row per slot, colours in the order of the queue; "
    "white is an empty slot.",
    "latencies": "Share of the requests that had at most a latency, by system.",
    "sweep": "The band reaches from the slowest round to the best.",
}
"""By the last part of a picture's name."""


@dataclass(frozen=True, slots=True)
class Report:
    """Content of the report.

    Attributes:
        about: what was measured, in a sentence or two.
        warnings: why not to trust it, if so.
        results: case by case.
        points: of the sweep; empty if there was none.
        settings: command, host and model, as JSON can hold them.
    """

    about: str
    warnings: Sequence[str]
    results: Sequence[CaseResult]
    points: Sequence[SweepPoint]
    settings: Mapping[str, Any]


def case_text(result: CaseResult) -> str:
    """A case's table and findings, for a terminal."""
    rows = [Row("", tuple(result.rounds), "static / continuous"), *table(result)]
    widths = [max(len(row.label) for row in rows)]
    widths += [max(len(row.values[column]) for row in rows) for column in range(len(result.rounds))]
    lines = [f"== {result.case.key}: {result.case.title}"]
    for row in rows:
        cells = [row.label.ljust(widths[0])]
        cells += [value.rjust(width) for value, width in zip(row.values, widths[1:], strict=True)]
        lines.append("  ".join([*cells, row.ratio.rjust(len(rows[0].ratio)), row.note]).rstrip())
    return "\n".join([*lines, *(f"- {sentence}" for sentence in findings(result))])


def sweep_text(points: Sequence[SweepPoint]) -> str:
    """The sweep's table and findings, for a terminal."""
    lines = [
        f"== sweep of the slots: {sweep_title(points)}",
        "slots  tokens/s: static  continuous   steps: static  continuous  ratio  slots alone   time ratio",
    ]
    for point in points:
        static, continuous = point.result.best(STATIC), point.result.best(CONTINUOUS)
        time = point.result.time_ratio()
        lines.append(
            f"{point.num_slots:5}  {static.tokens_per_s:16,.0f}  {continuous.tokens_per_s:10,.0f}  "
            f"{len(static.steps):14,}  {len(continuous.steps):10,}  {point.result.step_ratio:5.2f}  "
            f"{point.result.simulated_step_ratio:10.2f}   {time.best:.2f} ({time.low:.2f}..{time.high:.2f})"
        )
    return "\n".join([*lines, *(f"- {sentence}" for sentence in sweep_findings(points))])


def write_report(report: Report, folder: Path) -> None:
    """Writes report.html, one PNG per picture, and samples.json.

    Args:
        report: with at least one case whose requests were queued.
        folder: made if it is missing.
    Raises: ResultError: the folder cannot be written; names it.
    """
    queued = [result for result in report.results if result.case.is_queued]
    figures = {"ratios": draw_ratios(queued), "step-cost": draw_step_cost(report.results)}
    for result in report.results:
        figures[f"{result.case.key}-slots"] = draw_timelines(result)
        figures[f"{result.case.key}-latencies"] = draw_latencies(result)
    if report.points:
        figures["sweep"] = draw_sweep(report.points)
    pictures = [
        Picture(name, name, _CAPTIONS[name.rpartition("-")[2]], name, figure) for name, figure in figures.items()
    ]
    html = page(
        "page.html",
        pictures,
        package=("loadgen.experiments.batching", "."),
        report=report,
        sections=[(result, table(result), findings(result)) for result in report.results],
        sweep_title=sweep_title(report.points) if report.points else "",
        sweep_findings=sweep_findings(report.points) if report.points else [],
        settings=json.dumps(report.settings, indent=1, ensure_ascii=False),
    )
    texts = {"report.html": html, "samples.json": json.dumps(_samples(report)) + "\n"}
    write_folder(folder, texts, pictures)


def _samples(report: Report) -> dict[str, Any]:
    return {
        "about": report.about,
        "warnings": list(report.warnings),
        "settings": dict(report.settings),
        "cases": [_case_samples(result) for result in report.results],
        "sweep": [{"num_slots": point.num_slots, **_case_samples(point.result)} for point in report.points],
    }


def _case_samples(result: CaseResult) -> dict[str, Any]:
    return {
        "key": result.case.key,
        "title": result.case.title,
        "arrival_s": _plain(result.case.trace.arrival_s, 6),
        "input_tokens": result.case.trace.input_tokens.tolist(),
        "output_tokens": result.case.trace.output_tokens.tolist(),
        "rounds": {name: [_case_run_samples(p) for p in case_runs] for name, case_runs in result.rounds.items()},
    }


def _case_run_samples(case_run: CaseRun) -> dict[str, Any]:
    return {
        "seconds": round(case_run.seconds, 6),
        "cached_share": round(case_run.cached_share, 6),
        "client_cores": round(case_run.client_cores, 4),
        "num_misplaced": case_run.num_misplaced,
        "ttft_ms": _plain(case_run.latencies.ttft, 3),
        "normalized_ms": _plain(case_run.latencies.normalized, 3),
        "tpot_ms": _plain(case_run.latencies.tpot, 3),
        "rows_of_steps": case_run.steps.rows.tolist(),
        "tokens_of_steps": case_run.steps.tokens.tolist(),
        "ms_of_steps": _plain(case_run.steps.ms, 3),
        "occupancies": [list(asdict(occupancy).values()) for occupancy in case_run.slot_use.occupancies],
    }


def _plain(values: "np.ndarray[Any, np.dtype[np.float64]]", digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]
