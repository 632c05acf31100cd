"""The report: a page that needs nothing else, pictures that show every slot, samples that can be read again."""

import json
import re
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from loadgen.experiments.batching.charts import draw_latencies, draw_ratios, draw_step_cost, draw_sweep
from loadgen.experiments.batching.experiment import SweepPoint
from loadgen.experiments.batching.report import Report, case_text, sweep_text, write_report
from loadgen.experiments.batching.timelines import draw_timelines
from tests.support.loadgen.batching import ideal_result
from tests.support.loadgen.pages import Page

SKEWED = ([4] * 7 + [64]) * 4


def example_report() -> Report:
    results = [ideal_result([12] * 16, 8, key="uniform"), ideal_result(SKEWED, 8, key="skewed")]
    points = [SweepPoint(slots, ideal_result(SKEWED, slots, key="sweep")) for slots in (2, 16)]
    return Report("a <test> & nothing else", ["the machine was busy"], results, points, {"command": ["x"]})


def test_the_page_needs_nothing_else_and_says_everything(tmp_path: Path) -> None:
    report = example_report()
    write_report(report, tmp_path)
    page = (tmp_path / "report.html").read_text()
    Page(page).require_self_contained()
    assert "a &lt;test&gt; &amp; nothing else" in page
    for words in (
        "the machine was busy",
        "uniform: 16 answers",
        "skewed: 32 answers",
        "sweep of the slots",
        "TTFT, p99",
    ):
        assert words in page, words
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(pictures) == 2 + 2 * len(report.results) + 1
    for picture in pictures:
        xml.dom.minidom.parseString(picture.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1))


@pytest.mark.slow
def test_every_picture_is_a_file_too_and_samples_can_be_read_again(tmp_path: Path) -> None:
    report = example_report()
    write_report(report, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        *("ratios.png", "step-cost.png", "sweep.png"),
        *(f"{key}-{what}.png" for key in ("uniform", "skewed") for what in ("slots", "latencies")),
    }
    samples = json.loads((tmp_path / "samples.json").read_text())
    skewed = samples["cases"][1]
    assert skewed["output_tokens"] == SKEWED
    first = skewed["rounds"]["static"][0]
    case_run = report.results[1].rounds["static"][0]
    assert first["rows_of_steps"] == case_run.steps.rows.tolist()
    assert len(first["occupancies"]) == len(first["ttft_ms"]) == 32
    assert [point["num_slots"] for point in samples["sweep"]] == [2, 16]


@pytest.mark.slow
def test_a_report_without_a_sweep_has_none(tmp_path: Path) -> None:
    report = example_report()
    write_report(Report(report.about, [], report.results, [], {}), tmp_path)
    assert "sweep" not in (tmp_path / "report.html").read_text()
    assert not (tmp_path / "sweep.png").exists()


def test_the_terminal_gets_the_same_table_and_sentences() -> None:
    result = ideal_result(SKEWED, 8, key="skewed")
    text = case_text(result)
    assert text.startswith("== skewed: 32 answers\n")
    assert "static / continuous" in text.splitlines()[1]
    assert re.search(r"^steps +256 +\d+ +\d+ +\d\.\d\d  slots alone: 256 /", text, re.MULTILINE)
    assert text.count("\n- ") >= 4
    assert len(sweep_text([SweepPoint(8, result)]).splitlines()) == 3 + 3


def test_a_timeline_colours_taken_slots_and_leaves_idle_ones_white() -> None:
    result = ideal_result([1, 4, 1, 4], 2)  # static: one slot idle in 3 of 4 steps, twice
    figure = draw_timelines(result)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[:, :, :3]
    for axes, name in zip(figure.axes, ("static", "continuous"), strict=True):
        box = axes.get_window_extent()
        slot_use = result.best(name).slot_use
        for step in range(8):
            for slot in range(2):
                x = box.x0 + box.width * (step + 0.3) / 8
                y = pixels.shape[0] - (box.y1 - box.height * (slot + 0.25) / 2)
                is_taken = any(s.slot == slot and s.begin <= step < s.end for s in slot_use.occupancies)
                assert bool((pixels[int(y), int(x)] != 255).any()) == is_taken, (name, step, slot)


def test_a_much_shorter_run_is_drawn_again_at_its_own_scale() -> None:
    assert len(draw_timelines(ideal_result([12] * 16, 8)).axes) == 2
    much_longer = draw_timelines(ideal_result(SKEWED, 8))
    assert len(much_longer.axes) == 4
    assert [axes.get_xlim()[1] for axes in much_longer.axes] == [256, 256, 80, 80]


def test_charts_show_the_figures() -> None:
    result = ideal_result(SKEWED, 8, key="skewed")
    ratios = draw_ratios([result])
    texts = {text.get_text() for text in ratios.axes[0].texts}
    assert {f"{result.step_ratio:.2f}", f"{result.time_ratio().best:.2f}"} <= texts
    rows, ms = draw_step_cost([result]).axes[0].lines[0].get_data()
    assert dict(zip(rows, ms, strict=True))[1] == pytest.approx(2.1)
    assert len(draw_latencies(result).axes) == 3
    speed, _ = draw_sweep([SweepPoint(2, result), SweepPoint(8, result)]).axes
    assert speed.lines[0].get_ydata()[0] == pytest.approx(result.best("static").tokens_per_s)
