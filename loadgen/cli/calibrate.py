"""`calibrate`: what this host can measure; kept, so that later runs know when they come near it."""

import argparse
from typing import cast

from chairlift.service.flag_kinds import choice, notation, switch
from chairlift.service.flags import Flag, FlagParser
from loadgen.cli.flags import add_flags
from loadgen.cli.values import DURATION
from loadgen.run.calibrate import Protocol, calibrate
from loadgen.run.ceiling import Ceiling, ceiling_file, store_ceiling

_MIN_HOLD_S = 0.1  # first tokens come after 0.05 s


def _hold_s(text: str) -> float:
    seconds: float = DURATION.value_of(text)
    if seconds < _MIN_HOLD_S:
        raise ValueError
    return seconds


_HOLD = notation(_hold_s, "a duration of at least 100ms such as 500ms, 5s or 2m", "DURATION")
_FLAGS = (
    Flag("--protocol", "protocol to calibrate (default: %(default)s)", choice(("grpc", "http")), default="grpc"),
    Flag("--hold", "duration of each load (default: %(default)g s)", _HOLD, default=3.0),
    Flag(
        "--keep",
        "store the ceiling, so that later runs warn when they approach it (default: yes)",
        switch(),
        default=True,
    ),
    Flag("--dry-run", "describe the calibration without running it", switch()),
)


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb."""
    parser = FlagParser(
        prog,
        description="Measures how many messages per second this machine receives before its own load distorts "
        "latencies, and the error in recovering known latencies. Takes a minute or two on an idle machine.",
    )
    add_flags(parser, _FLAGS)
    return parser


def run(options: argparse.Namespace) -> int:
    """Calibrates; returns the exit status."""
    kept = f"kept in {ceiling_file()}" if options.keep else "not kept (--no-keep)"
    print(
        f"calibrating {options.protocol}: mock servers on this host, more and more streams for {options.hold:g} s "
        f"each; figures are {kept}",
        flush=True,
    )
    if options.dry_run:
        return 0
    ceiling = calibrate(cast("Protocol", options.protocol), hold_s=options.hold, say=_say)
    print(describe(ceiling))
    if options.keep:
        print(f"kept in {store_ceiling(ceiling)}")
    return 0


def describe(ceiling: Ceiling) -> str:
    """Returns the report as text."""
    workers = f"{ceiling.num_workers} worker{'s' * (ceiling.num_workers > 1)}"
    return (
        f"{ceiling.protocol} on {ceiling.host} ({ceiling.num_cpus} cores): {ceiling.messages_per_s:.0f} messages/s "
        f"with {workers}, {ceiling.messages_per_s_per_worker:.0f} with one; a run above 60 % of that is warned of\n"
        f"error of known latencies: TTFT {ceiling.ttft_error_ms:+.2f} ms, ITL {ceiling.itl_error_ms:+.3f} ms, "
        f"TPOT {ceiling.tpot_error_ms:+.3f} ms"
    )


def _say(line: str) -> None:
    print(f"  {line}", flush=True)
