"""The table in docs/architecture.md of how much there is to read has the figures that .ci/reading.py counts."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT

TOLERANCE = 0.05  # the table follows larger changes


@pytest.fixture(scope="module")
def reading() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reading", ROOT / ".ci" / "reading.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["reading"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows() -> list[tuple[int, int, int]]:
    """Files, lines and lines of code of each row."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## How much there is to read")[2].partition("\n## ")[0]
    found = re.findall(r"^\| [^|]+ \| ([\d,]+) \| ([\d,]+) \| ([\d,]*) ?\|", table, re.M)
    return [(number(files), number(lines), number(code or "0")) for files, lines, code in found]


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_packages_are_counted_right(reading: ModuleType) -> None:
    for row, places in zip(rows(), (reading.CORE, reading.HEART), strict=False):
        counted = reading.total(reading.files_of(places))
        assert row == pytest.approx((counted.files, counted.lines, counted.code), rel=TOLERANCE)


def test_other_projects_are_counted_as_the_script_says(reading: ModuleType) -> None:
    assert [row[:2] for row in rows()[3:]] == list(reading.PEERS.values())


def test_lines_are_code_documentation_or_neither(reading: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""One.\n\nTwo."""\n\n# a comment\nx = """\n\n"""  # more\n\n\ndef f():\n    """Three."""\n    return x\n'
    )
    assert reading.count(path) == reading.Count(files=1, lines=13, docstrings=4, comments_and_blank=4)
    assert reading.count(path).code == 5


@pytest.mark.slow
def test_files_that_a_completion_passes_through_are_counted_right(reading: ModuleType) -> None:
    """Starts an engine and a frontend."""
    counted = reading.total(reading.trace())
    assert rows()[2] == pytest.approx((counted.files, counted.lines, counted.code), rel=TOLERANCE)
