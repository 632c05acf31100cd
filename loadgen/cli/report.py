"""`report`: recomputes the reports of a run from its records, with other limits, percentiles or warm-up if given."""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from chairlift.service.flags import Flag, FlagParser
from loadgen.checks.selfcheck import judge
from loadgen.cli.flags import ExitStatus, add_flags
from loadgen.cli.run_options import STRICT_FLAG, add_measure_arguments
from loadgen.cli.values import FOLDER, by_name
from loadgen.errors import OptionError
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.samples import samples_of
from loadgen.report.files import write_report
from loadgen.report.terminal import print_summary
from loadgen.store import RUN, load


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Reads the records of a run, measures and judges it anew, prints the summary and writes "
        "result.json, report.html and the pictures. Warm-up, limits and percentiles are the run's unless given here.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the run")
    group = parser.add_argument_group("results")
    add_measure_arguments(group)
    add_flags(group, [Flag("--result-dir", "folder for the reports (default: DIR)", FOLDER, "OTHER"), STRICT_FLAG])
    parser.set_defaults(warmup=None, goodput=None, metric_percentiles=None)
    return parser


def run(options: argparse.Namespace) -> int:
    """Measures, judges, prints and writes; returns the exit status.

    Raises:
        ResultError: there is no run, it is damaged, or the reports cannot be written.
        OptionError: a limit or a percentile that means nothing, or the reports would replace those of another run.
    """
    folder = options.result_dir or options.folder
    if (folder / RUN).exists() and not folder.samefile(options.folder):
        raise OptionError(
            f"--result-dir {folder}: holds another run, whose reports would be replaced; name another one"
        )
    recorded = load(options.folder)
    samples = samples_of(recorded)
    metrics = measure(
        recorded, _measure_options(options, MeasureOptions.from_json(recorded.settings.get("measure", {}))), samples
    )
    verdict = judge(recorded, metrics, samples=samples)
    write_report(recorded, metrics, verdict, folder, samples)
    print_summary(Console(), recorded, metrics, verdict, folder)
    return ExitStatus.INVALID if options.strict and verdict.level == "INVALID" else 0


def _measure_options(options: argparse.Namespace, recorded: MeasureOptions) -> MeasureOptions:
    """What was measured when it was run, and on top what was given now."""
    given = {
        "warmup_s": options.warmup,
        "slo": None if options.goodput is None else by_name("--goodput", options.goodput),
        "percentiles": None if options.metric_percentiles is None else tuple(options.metric_percentiles),
    }
    return replace(recorded, **{name: value for name, value in given.items() if value is not None})
