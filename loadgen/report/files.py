"""The reports of a run in its folder: result.json, report.html, and each picture as PNG."""

from pathlib import Path

from loadgen.checks.selfcheck import Verdict
from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples, samples_of
from loadgen.record import RunData
from loadgen.report.folder import json_text, write_folder
from loadgen.report.html import run_page
from loadgen.report.plot_latency import cumulative, percentile_curves, ttft_by_prompt
from loadgen.report.plot_requests import requests_in_time
from loadgen.report.plot_style import Picture
from loadgen.report.plot_timeline import timeline
from loadgen.report.result import result_document

RESULT, PAGE = "result.json", "report.html"


def write_report(
    run: RunData, metrics: Metrics, verdict: Verdict, folder: Path, samples: Samples | None = None
) -> tuple[Path, ...]:
    """Writes all of them, each whole or not at all; returns their paths.

    Args:
        run: what is known of it.
        metrics, verdict: of this run.
        folder: made if it is not there.
        samples: of this run, if they are there already.

    Raises: ResultError: the folder cannot be written, or the disk is full; names it.
    """
    samples = samples or samples_of(run)
    drawn = pictures(run, metrics, samples)
    texts = {
        RESULT: json_text(result_document(run, metrics, verdict, samples)),
        PAGE: run_page(run, metrics, verdict, drawn),
    }
    return write_folder(folder, texts, drawn)


def pictures(run: RunData, metrics: Metrics, samples: Samples) -> tuple[Picture, ...]:
    """Draws all pictures in the order of the report; a run without requests gets empty axes."""
    return (
        timeline(run, metrics, samples),
        cumulative(metrics, samples),
        percentile_curves(metrics, samples),
        ttft_by_prompt(run, metrics, samples),
        requests_in_time(run, metrics, samples),
    )
