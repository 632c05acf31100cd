"""The table in docs/architecture.md of how much there is to read has the figures that .ci/reading.py counts."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.pages import ROOT

TOLERANCE = 0.05  # the table follows larger changes
READING = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "reading.py")))


def rows() -> list[tuple[int, int, int]]:
    """Files, lines and lines of code of each row."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## How much there is to read")[2].partition("\n## ")[0]
    found = re.findall(r"^\| [^|]+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]*) ?\|", table, re.M)
    return [(number(files), number(lines), number(code or "0")) for files, lines, code in found]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_packages_are_counted_right() -> None:
    for row, places in zip(rows(), (READING.CORE, READING.HEART), strict=False):
        counted = READING.total(READING.files_of(places))
        assert row == pytest.approx((counted.files, counted.lines, counted.code), rel=TOLERANCE)


def test_lines_are_code_documentation_or_neither(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""One.\n\nTwo."""\n\n# a comment\nx = """\n\n"""  # more\n\n\ndef f():\n    """Three."""\n    return x\n'
    )
    assert READING.count(path) == (1, 13, 5)  # files, lines, code


@pytest.mark.slow
def test_files_that_a_completion_passes_through_are_counted_right() -> None:
    """Starts an engine and a frontend."""
    counted = READING.total(READING.trace())
    assert rows()[2] == pytest.approx((counted.files, counted.lines, counted.code), rel=TOLERANCE)
