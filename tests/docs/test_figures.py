"""Figures that other pages cite from a row of docs/performance.md, as in (C5), are those of the row."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PERFORMANCE = (DOCS / "performance.md").read_text()


@pytest.mark.parametrize(("page", "num_citations"), [("architecture.md", 9), ("tuning.md", 7)])
def test_cited_figures_are_those_of_the_row(page: str, num_citations: int) -> None:
    text = (DOCS / page).read_text()
    citations = re.findall(r"((?:(?!\. |; |: |\(C|\||\)).)*)\((C\d+)\)", text, re.S)
    assert len(citations) >= num_citations
    for sentence, row in citations:
        known = set(re.findall(r"\d[\d.,]*\d|\d", "".join(re.findall(rf"^\| {row} \|.*$", PERFORMANCE, re.M))))
        figures = re.findall(r"(\d[\d.,]*\d|\d)(?=x| %| ms| tokens/s)", sentence)
        assert figures, f"{row} is cited without a figure: {sentence}"
        assert set(figures) <= known, f"{row}: {sentence}"
