"""The reports of a comparison in its folder: comparison.json, comparison.html, and each picture as PNG."""

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadgen.atomic_file import atomic_file, writing_to
from loadgen.comparison.comparable import Side
from loadgen.comparison.compare import Comparison
from loadgen.plain_json import to_json
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
from loadgen.report.plot_comparison import comparison_pictures
from loadgen.report.plot_style import Picture, png, svg

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
    contents = {
        COMPARISON: (to_json(comparison_document(comparison), indent=1) + "\n").encode(),
        PAGE: _page(comparison, sides, drawn, about or {}).encode(),
        **{f"{picture.name}.png": png(picture) for picture in drawn},
    }
    with writing_to(folder):
        for name, content in contents.items():
            with atomic_file(folder / name) as file:
                file.write(content)
    return tuple(folder / name for name in contents)


def _page(comparison: Comparison, sides: Sequence[Side], drawn: Sequence[Picture], about: Mapping[str, str]) -> str:
    environment = Environment(
        loader=PackageLoader("loadgen.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    functions = (basis, conclusion, effect_text, good_or_bad, interval_text, remarks, value_text)
    text = environment.get_template("comparison.html.j2").render(
        title=title(comparison),
        css=Markup((files("loadgen.report") / "templates" / "report.css").read_text(encoding="utf-8")),
        comparison=comparison,
        sides=sides,
        notes=[note for note in notes(comparison) if not note.startswith("FORCED")],
        pictures=[(picture, Markup(svg(picture))) for picture in drawn],
        about=about,
        **{function.__name__: function for function in functions},
    )
    return f"{text.strip()}\n"
