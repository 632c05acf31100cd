"""The reports of a comparison in its folder: comparison.json, comparison.html, and each picture as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.comparison.comparable import Side
from loadgen.comparison.compare import Comparison
from loadgen.report.comparison_text import (
    basis,
    comparison_document,
    conclusion,
    effect_text,
    good_or_bad,
    interval_text,
    notes,
    remarks,
    title,
    value_text,
)
from loadgen.report.folder import json_text, page, write_folder
from loadgen.report.plot_comparison import comparison_pictures

COMPARISON, PAGE = "comparison.json", "comparison.html"


def write_comparison(
    comparison: Comparison, sides: Sequence[Side], folder: Path, *, about: Mapping[str, str] | None = None
) -> tuple[Path, ...]:
    """Writes all of them, each whole or not at all; returns their paths.

    Args:
        comparison: what came out.
        sides: what was compared, in the same order.
        folder: made if it is not there.
        about: names and texts for the foot of the page, such as the folders of the runs.

    Raises: ResultError: the folder cannot be written, or the disk is full; names it.
    """
    drawn = comparison_pictures(comparison, sides)
    functions = (basis, conclusion, effect_text, good_or_bad, interval_text, remarks, value_text)
    named: dict[str, Any] = {function.__name__: function for function in functions}
    text = page(
        "comparison.html.j2",
        drawn,
        title=title(comparison),
        comparison=comparison,
        sides=sides,
        notes=[note for note in notes(comparison) if not note.startswith("FORCED")],
        about=about or {},
        **named,
    )
    return write_folder(folder, {COMPARISON: json_text(comparison_document(comparison)), PAGE: text}, drawn)
