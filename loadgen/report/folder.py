"""Writes a report into a folder: figures as JSON, one self-contained HTML page, and each picture as PNG."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from loadgen.atomic_file import atomic_file, writing_to
from loadgen.plain_json import to_json
from loadgen.report.figures import milliseconds
from loadgen.report.plot_style import Picture, png, svg

_RASTER_DPI = 160
_TEMPLATES = ("loadgen.report", "templates")


def page(template: str, pictures: Sequence[Picture], *, package: tuple[str, str] = _TEMPLATES, **variables: Any) -> str:
    """Renders a page; what users or servers named is escaped.

    Args:
        template: its file.
        pictures: drawn into the page.
        package: package and folder of the template.
        variables: of the template, which also has `css` and `pictures`.
    """
    environment = Environment(loader=PackageLoader(*package), autoescape=True, undefined=StrictUndefined)
    environment.filters["ms"] = milliseconds
    text = environment.get_template(template).render(
        css=Markup((files("loadgen.report") / "templates" / "report.css").read_text(encoding="utf-8")),
        pictures=[(picture, Markup(svg(picture, _RASTER_DPI))) for picture in pictures],
        **variables,
    )
    return f"{text.strip()}\n"


def write_folder(folder: Path, texts: dict[str, str], pictures: Sequence[Picture]) -> tuple[Path, ...]:
    """Writes texts by file name and the pictures, each file whole or not at all; returns their paths.

    Raises: ResultError: the folder cannot be written, or the disk is full; names it.
    """
    contents = {name: text.encode(errors="backslashreplace") for name, text in texts.items()}
    contents |= {f"{picture.name}.png": png(picture) for picture in pictures}
    with writing_to(folder):
        for name, content in contents.items():
            with atomic_file(folder / name) as file:
                file.write(content)
    return tuple(folder / name for name in contents)


def json_text(document: object) -> str:
    """Returns a document as the text of a JSON file."""
    return to_json(document, indent=1) + "\n"
