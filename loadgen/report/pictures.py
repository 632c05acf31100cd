"""The pictures of a run, in the order a report shows them."""

from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples
from loadgen.record import RunData
from loadgen.report.plot_latency import cumulative, percentile_curves, ttft_by_prompt
from loadgen.report.plot_requests import requests_in_time
from loadgen.report.plot_style import Picture
from loadgen.report.plot_timeline import timeline


def pictures(run: RunData, metrics: Metrics, samples: Samples) -> tuple[Picture, ...]:
    """Draws all of them; a run without requests gets empty axes."""
    return (
        timeline(run, metrics, samples),
        cumulative(metrics, samples),
        percentile_curves(metrics, samples),
        ttft_by_prompt(run, metrics, samples),
        requests_in_time(run, metrics, samples),
    )
