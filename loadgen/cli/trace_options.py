"""Flags that read, cut and scale a trace, and their order."""

import argparse
from math import inf
from pathlib import Path

from chairlift.service.flag_kinds import ANY_TEXT, choice, integer, switch
from chairlift.service.flags import Flag
from loadgen.cli.flags import add_flags
from loadgen.cli.values import POSITIVE, WINDOW
from loadgen.errors import OptionError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.reader import FORMATS, read_trace
from loadgen.trace.schema import Trace
from loadgen.trace.window import at_rate, at_speed, cut, dequantize, fit, from_zero, limit, scale_lengths, tick_s

SEED_FLAG = Flag("--seed", "random seed (default: %(default)s)", integer(0), default=0)
FIT_FLAGS = (
    Flag("--max-model-len", "maximum tokens of prompt and answer together (default: no limit)", integer(1), "L"),
    Flag(
        "--overlong",
        "drop and count, clip, or refuse requests over --max-model-len (default: drop)",
        choice(("drop", "clip", "fail")),
    ),
)
_READING_FLAGS = (
    Flag(
        "--trace-format",
        "format of the file (default: %(default)s, from its first line)",
        choice(FORMATS),
        "{" + ",".join(FORMATS) + "}",
        "auto",
    ),
    Flag("--trace-model", "keep only requests to this model (burstgpt)", ANY_TEXT, "NAME", ""),
    Flag("--sort", "sort rows by arrival where timestamps are out of order", switch()),
    Flag("--skip-malformed", "skip and count malformed rows", switch()),
    SEED_FLAG,
)
_CUTTING_FLAGS = (
    Flag("--window", "keep only this part of the trace, such as 600:1200, 10m:20m or 10m:", WINDOW),
    Flag("--limit", "keep only the first N of the remaining requests", integer(1)),
    Flag("--speed", "speed up the schedule by X: 2 sends 10 min in 5 min", POSITIVE),
    Flag("--rate", "scale the schedule to R requests/s on average", POSITIVE, "R"),
    Flag("--length-scale", "scale prompt and output lengths by X; shared prefixes stay shared", POSITIVE),
    Flag(
        "--dequantize",
        "spread requests over the ticks of a coarse clock (default: %(default)s, where one is detected)",
        choice(("auto", "off")),
        default="auto",
    ),
    *FIT_FLAGS,
)
TRACE_FLAGS = ("trace_model", "sort", "skip_malformed", "window", "limit", "speed", "rate", "length_scale")
"""Attributes of the flags that a made-up data set has no use for."""


def add_reading_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the flags of `read` to a parser or a group."""
    add_flags(group, _READING_FLAGS)


def add_cutting_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the flags of `transformed` to a parser or a group."""
    add_flags(group, _CUTTING_FLAGS)


def read(path: Path, options: argparse.Namespace) -> Trace:
    """Reads a file as the flags say.

    Raises: TraceError, OptionError: see `read_trace`.
    """
    return read_trace(
        path,
        format=options.trace_format,
        options=ReadOptions(
            sort=options.sort,
            skip_malformed=options.skip_malformed,
            model=options.trace_model,
            seed=options.seed,
            window_s=getattr(options, "window", None) or (0.0, inf),
        ),
    )


def transformed(trace: Trace, options: argparse.Namespace) -> Trace:
    """Cuts and scales a trace by the flags; arrivals start at 0.

    A quantised clock is spread first, so that a window cuts the spread schedule; lengths are scaled before they are
    fitted; `--limit` counts what is left to run, and `--rate` is the rate of exactly that.

    Raises: OptionError: flags contradict each other, or leave nothing.
    """
    if options.speed is not None and options.rate is not None:
        raise OptionError("--speed and --rate both set the clock; give one of them")
    if options.dequantize == "auto" and tick_s(trace) is not None:
        trace = dequantize(trace, options.seed)
    if options.window is not None:
        trace = cut(trace, *options.window)
    if options.length_scale is not None:
        trace = scale_lengths(trace, options.length_scale)
    trace = fitted(trace, options)
    if options.limit is not None:
        trace = limit(trace, options.limit)
    if options.speed is not None:
        trace = at_speed(trace, options.speed)
    if options.rate is not None:
        trace = at_rate(trace, options.rate)
    return from_zero(trace)


def fitted(trace: Trace, options: argparse.Namespace) -> Trace:
    """Fits requests to the context by the flags.

    Raises: OptionError: see `fit`; or `--overlong` without `--max-model-len`.
    """
    if options.max_model_len is None:
        if options.overlong is not None:
            raise OptionError(f"--overlong {options.overlong} needs --max-model-len to say what is too long")
        return trace
    return fit(trace, options.max_model_len, options.overlong or "drop")
