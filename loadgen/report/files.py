"""The reports of a run in its folder: result.json, report.html, and each picture as PNG."""

from pathlib import Path

from loadgen.atomic_file import atomic_file, writing_to
from loadgen.checks.selfcheck import Verdict
from loadgen.measure.metrics import Metrics
from loadgen.measure.samples import Samples, samples_of
from loadgen.plain_json import to_json
from loadgen.record import RunData
from loadgen.report.html import page
from loadgen.report.pictures import pictures
from loadgen.report.plot_style import png
from loadgen.report.result import result_document

RESULT, PAGE = "result.json", "report.html"


def write_report(
    run: RunData, metrics: Metrics, verdict: Verdict, folder: Path, samples: Samples | None = None
) -> tuple[Path, ...]:
    """Writes all of them, each whole or not at all; returns their paths.

    Args:
        run: what is known of it.
        metrics, verdict: of this run.
        folder: made if it is not there.
        samples: of this run, if they are there already.

    Raises: ResultError: the folder cannot be written, or the disk is full; names it.
    """
    samples = samples or samples_of(run)
    drawn = pictures(run, metrics, samples)
    contents = {
        RESULT: (to_json(result_document(run, metrics, verdict, samples), indent=1) + "\n").encode(),
        PAGE: page(run, metrics, verdict, drawn).encode(),
        **{f"{picture.name}.png": png(picture) for picture in drawn},
    }
    with writing_to(folder):
        for name, content in contents.items():
            with atomic_file(folder / name) as file:
                file.write(content)
    return tuple(folder / name for name in contents)
