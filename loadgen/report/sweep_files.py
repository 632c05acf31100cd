"""The reports of a sweep in its folder: sweep.json, sweep.html, and each picture as PNG."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadgen.atomic_file import atomic_file, writing_to
from loadgen.plain_json import to_json
from loadgen.report.plot_style import png, svg
from loadgen.report.plot_sweep import sweep_pictures
from loadgen.report.sweep_text import AXIS_NAMES, COLUMNS, cells, conclusions, limits_text, sweep_document
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
    environment = Environment(
        loader=PackageLoader("loadgen.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    page = environment.get_template("sweep.html.j2").render(
        css=Markup((files("loadgen.report") / "templates" / "report.css").read_text(encoding="utf-8")),
        title=f"Sweep over {AXIS_NAMES[sweep.axis]}",
        limits=limits_text(slo),
        about=about or {},
        conclusions=conclusions(sweep, slo),
        columns=COLUMNS,
        load_levels=[(load_level, cells(load_level, limits=bool(slo))) for load_level in sweep.load_levels],
        pictures=[(picture, Markup(svg(picture))) for picture in drawn],
    )
    contents = {
        SWEEP: (to_json(sweep_document(sweep, slo), indent=1) + "\n").encode(),
        PAGE: f"{page.strip()}\n".encode(),
        **{f"{picture.name}.png": png(picture) for picture in drawn},
    }
    with writing_to(folder):
        for name, content in contents.items():
            with atomic_file(folder / name) as file:
                file.write(content)
    return tuple(folder / name for name in contents)
