"""`compare`: runs of one workload, side by side, from their records."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from chairlift.service.flag_kinds import integer, repeated, switch
from chairlift.service.flags import Flag, FlagParser
from loadgen.checks.selfcheck import judge
from loadgen.cli.flags import add_flags
from loadgen.cli.result_folder import result_folder
from loadgen.cli.values import DURATION, FOLDER, SLO, by_name
from loadgen.comparison.bootstrap import RESAMPLES
from loadgen.comparison.compare import Side, compare
from loadgen.errors import OptionError
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.report.comparison_files import PAGE, write_comparison
from loadgen.report.comparison_text import comparison_lines
from loadgen.store import load

_FLAGS = (
    Flag("--warmup", "exclude this first part (default: as in the first run)", DURATION),
    Flag(
        "--goodput",
        "latency limits of goodput (default: as in the first run)",
        repeated(SLO, takes_several=True),
        aliases=["--slo"],
    ),
    Flag("--force", "compare even if workloads differ or a run is INVALID; the report notes it", switch()),
    Flag("--resamples", "bootstrap resamples (default: 10000)", integer(1), default=RESAMPLES),
    Flag("--seed", "random seed of the bootstrap (default: 0)", integer(0), default=0),
    Flag("--result-dir", "folder for the report (default: loadgen-results/compare-TIME)", FOLDER),
)


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Pairs runs request by request. The first is the one that others are measured against. Runs with "
        "the same LABEL are repeats of one side, in the order in which they were run.",
    )
    parser.add_argument("runs", nargs="+", metavar="[LABEL=]DIR", help="folder of a run, or its result.json")
    add_flags(parser, _FLAGS)
    return parser


def run(options: argparse.Namespace) -> int:
    """Compares them; returns the exit status."""
    named = _named(options.runs)
    if len({label for label, _ in named}) < 2:
        raise OptionError("compare: name the runs of at least two sides, as [LABEL=]DIR [LABEL=]DIR")
    times = Counter(folder.resolve() for _, folder in named)
    for _, folder in named:
        if times[folder.resolve()] > 1:  # repeats are independent: counted twice, a run would narrow the intervals
            raise OptionError(f"compare: {folder} is named {times[folder.resolve()]} times; name each run once")
    folders: dict[str, list[Path]] = {}
    for label, folder in named:
        folders.setdefault(label, []).append(folder)
    runs = {label: [load(folder) for folder in several] for label, several in folders.items()}
    saved = MeasureOptions.from_json(next(iter(runs.values()))[0].settings.get("measure", {}))
    chosen = MeasureOptions(
        warmup_s=saved.warmup_s if options.warmup is None else options.warmup,
        slo=saved.slo if options.goodput is None else by_name("--goodput", options.goodput),
        percentiles=saved.percentiles,
    )
    sides = [
        Side(label, tuple(several), tuple(judge(one, measure(one, chosen)) for one in several))
        for label, several in runs.items()
    ]
    comparison = compare(sides, chosen, force=options.force, resamples=options.resamples, seed=options.seed)
    about = {label: ", ".join(map(str, several)) for label, several in folders.items()}
    with result_folder(options.result_dir, "compare") as folder:
        write_comparison(comparison, sides, folder, about=about)
    console = Console()
    for line in comparison_lines(comparison):
        console.print(line, soft_wrap=True)
    console.print(f"Results: {folder}, picture and table in {PAGE}", soft_wrap=True, markup=False)
    return 0


def _named(texts: Sequence[str]) -> list[tuple[str, Path]]:
    """Label and folder of each run; without a label the folder's name, or all of its path where two share one."""
    split = []
    for text in texts:
        label, equals, path = text.partition("=")
        labelled = bool(equals) and not Path(text).exists()
        if labelled and not (label and path):
            raise OptionError(f"{text}: must be [LABEL=]DIR")
        folder = Path(path if labelled else text)
        split.append((label if labelled else "", folder.parent if folder.name == "result.json" else folder))
    names = [folder.resolve().name for label, folder in split if not label]
    return [
        (label or (str(folder) if names.count(folder.resolve().name) > 1 else folder.resolve().name), folder)
        for label, folder in split
    ]
