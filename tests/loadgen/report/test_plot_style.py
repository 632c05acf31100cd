"""Ticks that can be read, drawings that follow the page."""

import pytest
from matplotlib.figure import Figure

from loadgen.report.palette import BLUE
from loadgen.report.plot_style import Picture, headline, log_ticks, new_figure, png, styled, svg


@pytest.mark.parametrize("low_ms", [0.01, 0.7, 33.0, 4000.0])
@pytest.mark.parametrize("ratio", [1.5, 4.0, 30.0, 1e3, 1e6])
@pytest.mark.parametrize("most", [4, 8])
def test_a_logarithmic_axis_has_some_ticks_and_never_too_many(low_ms: float, ratio: float, most: int) -> None:
    axes = Figure().subplots()
    axes.set_xlim(low_ms, low_ms * ratio)
    axes.set_xscale("log")
    log_ticks(axes.xaxis, low_ms, low_ms * ratio, max_ticks=most)
    ticks = [tick for tick in axes.xaxis.get_majorticklocs() if low_ms <= tick <= low_ms * ratio]
    assert 1 <= len(ticks) <= most
    assert all(axes.xaxis.get_major_formatter()(tick).endswith(("ms", "s", "min")) for tick in ticks)


def _picture(name: str = "<Name & more>") -> Picture:
    with styled():
        figure = new_figure(2.0)
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=BLUE)
        headline(axes, (name, BLUE))
    return Picture("name", "Title", "Caption", "Alternative", figure)


def test_an_svg_stands_in_a_page() -> None:
    text = svg(_picture())
    assert text.startswith('<svg viewBox="0 0 ')
    assert "xmlns" not in text
    assert "metadata" not in text
    assert "&lt;Name &amp; more&gt;" in text
    assert "var(--blue)" in text
    assert 'id="name-' in text
    assert 'id="figure_1"' not in text


@pytest.mark.parametrize("name", [r"$\alpha_{$", "a$b$c"])
def test_dollar_signs_are_text_not_formulas(name: str) -> None:
    picture = _picture(name)
    assert f">{name}</text>" in svg(picture)
    assert png(picture).startswith(b"\x89PNG")
