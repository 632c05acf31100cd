"""The reports of a sweep in its folder: sweep.json, sweep.html, and each picture as PNG."""

from collections.abc import Mapping
from pathlib import Path

from loadgen.report.folder import json_text, page, write_folder
from loadgen.report.plot_sweep import sweep_pictures
from loadgen.report.rows import limits_text
from loadgen.report.sweep_text import AXIS_NAMES, COLUMNS, cells, conclusions, sweep_document
from loadgen.sweep.sweep import Sweep

SWEEP, PAGE = "sweep.json", "sweep.html"


def write_sweep(
    sweep: Sweep, slo: Mapping[str, float], folder: Path, *, about: Mapping[str, str] | None = None
) -> tuple[Path, ...]:
    """Writes all of them, each whole or not at all; returns their paths.

    Args:
        sweep: with at least one load level.
        slo: limits in ms by metric.
        folder: made if it is not there.
        about: names and texts for the head of the page, such as target and command.

    Raises: ResultError: the folder cannot be written, or the disk is full; names it.
    """
    drawn = sweep_pictures(sweep, slo)
    text = page(
        "sweep.html.j2",
        drawn,
        title=f"Sweep over {AXIS_NAMES[sweep.axis]}",
        limits=limits_text(slo),
        about=about or {},
        conclusions=conclusions(sweep, slo),
        columns=COLUMNS,
        load_levels=[(load_level, cells(load_level, limits=bool(slo))) for load_level in sweep.load_levels],
    )
    return write_folder(folder, {SWEEP: json_text(sweep_document(sweep, slo)), PAGE: text}, drawn)
