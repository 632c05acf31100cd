"""The experiment's results as text, as pictures, as one self-contained page, and as raw samples."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from matplotlib.figure import Figure

from loadgen.errors import ResultError
from loadgen.experiments.batching.case_run import CaseRun
from loadgen.experiments.batching.charts import draw_latencies, draw_ratios, draw_step_cost, draw_sweep
from loadgen.experiments.batching.experiment import SweepPoint
from loadgen.experiments.batching.findings import findings, sweep_findings, sweep_title
from loadgen.experiments.batching.policies import CONTINUOUS, STATIC
from loadgen.experiments.batching.results import CaseResult, Row, table
from loadgen.experiments.batching.timelines import draw_timelines

_DPI = 160


@dataclass(frozen=True, slots=True)
class Report:
    """Everything there is to say.

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
        folder: must exist.
    Raises: ResultError: the disk does not take it.
    """
    queued = [result for result in report.results if result.case.is_queued]
    pictures = {"ratios": draw_ratios(queued), "step-cost": draw_step_cost(report.results)}
    for result in report.results:
        pictures[f"{result.case.key}-seats"] = draw_timelines(result)
        pictures[f"{result.case.key}-latencies"] = draw_latencies(result)
    if report.points:
        pictures["sweep"] = draw_sweep(report.points)
    try:
        for name, picture in pictures.items():
            picture.savefig(folder / f"{name}.png", dpi=_DPI)
        (folder / "report.html").write_text(_page(report, {name: _svg(p, name) for name, p in pictures.items()}))
        (folder / "samples.json").write_text(json.dumps(_samples(report)) + "\n")
    except OSError as error:
        raise ResultError(f"results in {folder}: {error.strerror}") from error


def _page(report: Report, svgs: Mapping[str, Markup]) -> str:
    sections = [
        {
            "name": result.case.key,
            "title": result.case.title,
            "findings": findings(result),
            "systems": list(result.rounds),
            "rows": table(result),
            "timelines": svgs[f"{result.case.key}-seats"],
            "latencies": svgs[f"{result.case.key}-latencies"],
        }
        for result in report.results
    ]
    sweep = None
    if report.points:
        sweep = {
            "title": sweep_title(report.points),
            "findings": sweep_findings(report.points),
            "figure": svgs["sweep"],
        }
    environment = Environment(loader=PackageLoader("loadgen.experiments.batching", "."), autoescape=select_autoescape())
    return environment.get_template("page.html").render(
        about=report.about,
        warnings=report.warnings,
        ratios=svgs["ratios"],
        step_cost=svgs["step-cost"],
        sections=sections,
        sweep=sweep,
        settings=json.dumps(report.settings, indent=1, ensure_ascii=False),
    )


def _svg(figure: Figure, name: str) -> Markup:
    """The picture as an element of a page; text stays text, and ids differ from those of other pictures."""
    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", dpi=_DPI, metadata={"Date": None})
    svg = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text.getvalue())  # names of parts, the same in every picture
    return Markup(svg[svg.index("<svg") :])  # matplotlib's own, its text is escaped


def _samples(report: Report) -> dict[str, Any]:
    return {
        "about": report.about,
        "warnings": list(report.warnings),
        "settings": dict(report.settings),
        "cases": [_case_samples(result) for result in report.results],
        "sweep": [{"num_seats": point.num_slots, **_case_samples(point.result)} for point in report.points],
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
        "sittings": [list(asdict(occupancy).values()) for occupancy in case_run.slot_use.occupancies],
    }


def _plain(values: "np.ndarray[Any, np.dtype[np.float64]]", digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]
