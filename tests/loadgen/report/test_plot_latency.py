"""Curves go where the figures are."""

import numpy as np
import pytest

from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.samples import samples_of
from loadgen.record import RunData
from loadgen.report.palette import BLUE, RED
from loadgen.report.plot_latency import cumulative, percentile_curves, ttft_by_prompt
from tests.support.loadgen.runs import Answered, run_of, synthetic_run


def test_the_curve_passes_through_the_quoted_percentiles() -> None:
    run = synthetic_run(400)
    metrics = measure(run, MeasureOptions(warmup_s=2.0, slo={"ttft": 120.0}))
    picture = cumulative(metrics, samples_of(run))
    axes = picture.figure.axes[0]
    curve = next(line for line in axes.lines if line.get_color() == BLUE)
    x, share = np.asarray(curve.get_xdata(), dtype=float), np.asarray(curve.get_ydata(), dtype=float)
    ttft = metrics.steady.latencies.ttft
    for percentile in (50.0, 99.0):
        assert np.interp(percentile, share, x) == pytest.approx(ttft.at(percentile), rel=0.01)
    limits = [line for line in axes.lines if line.get_color() == RED]
    assert np.asarray(limits[0].get_xdata(), dtype=float).tolist() == [120.0, 120.0]


@pytest.mark.parametrize(("count", "drawn"), [(300, 300), (3000, 1000)])
def test_dots_that_are_left_out_are_counted(count: int, drawn: int) -> None:
    run = synthetic_run(count, rate=100.0, output_tokens=(2, 3))
    picture = ttft_by_prompt(run, measure(run), samples_of(run))
    dots = sum(len(np.asarray(one.get_offsets())) for one in picture.figure.axes[0].collections)
    chosen = measure(run).steady.latencies.ttft.n
    assert dots == min(drawn, chosen)
    assert ("requests are drawn, evenly chosen" in picture.caption) == (count == 3000)


def test_a_median_stands_where_ten_prompts_are_about_as_long() -> None:
    """Twelve prompts of 100 tokens, nine of 500, and ten of 1,000 to 1,009."""
    lengths = [100] * 12 + [500] * 9 + list(range(1000, 1010))
    run = run_of(
        [Answered(float(i), ((i + length / 1e4, 1),), input_tokens=length) for i, length in enumerate(lengths)]
    )
    picture = ttft_by_prompt(run, measure(run), samples_of(run))
    segments = [line for line in picture.figure.axes[0].lines if line.get_marker() == "None"]
    drawn = [(*np.asarray(line.get_xdata()).tolist(), float(np.asarray(line.get_ydata())[0])) for line in segments]
    assert drawn == [pytest.approx((100, 100, 10.0)), pytest.approx((1000, 1009, 100.45))]
    assert "median of 1,000 to 1,009 tokens 100 ms" in picture.alt


@pytest.mark.parametrize("run", [run_of([]), synthetic_run(1, output_tokens=(1, 1))])
def test_nothing_to_draw_is_an_empty_picture(run: RunData) -> None:
    metrics, samples = measure(run), samples_of(run)
    for picture in (
        cumulative(metrics, samples),
        percentile_curves(metrics, samples),
        ttft_by_prompt(run, metrics, samples),
    ):
        assert picture.figure.axes
