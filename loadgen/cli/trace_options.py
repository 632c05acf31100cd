"""Flags that read, cut and scale a trace, and their order."""

import argparse
from math import inf
from pathlib import Path
from typing import Any

from loadgen.cli.flags import Flag, add_flags
from loadgen.cli.values import at_least_one, duration_s, positive
from loadgen.errors import OptionError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.reader import FORMATS, read_trace
from loadgen.trace.schema import Trace
from loadgen.trace.window import at_rate, at_speed, cut, dequantize, fit, from_zero, limit, scale_lengths, tick_s


def _window_s(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window such as 600:1200, 10m:20m or 10m:")
    return duration_s(start) if start else 0.0, duration_s(end) if end else inf


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


SEED_FLAG = Flag("--seed", "random seed (default: %(default)s)", _seed, "N", 0)
FIT_FLAGS = (
    Flag("--max-model-len", "maximum tokens of prompt and answer together (default: no limit)", at_least_one, "L"),
    Flag(
        "--overlong",
        "drop and count, clip, or refuse requests over --max-model-len (default: drop)",
        choices=("drop", "clip", "fail"),
    ),
)
_READING_FLAGS = (
    Flag(
        "--trace-format",
        "format of the file (default: %(default)s, from its first line)",
        default="auto",
        choices=FORMATS,
    ),
    Flag("--trace-model", "keep only requests to this model (burstgpt)", str, "NAME", ""),
    Flag("--sort", "sort rows by arrival where timestamps are out of order", bool),
    Flag("--skip-malformed", "skip and count malformed rows", bool),
    SEED_FLAG,
)
_CUTTING_FLAGS = (
    Flag("--window", "keep only this part of the trace, such as 600:1200, 10m:20m or 10m:", _window_s, "FROM:TO"),
    Flag("--limit", "keep only the first N of the remaining requests", at_least_one),
    Flag("--speed", "speed up the schedule by X: 2 sends 10 min in 5 min", positive),
    Flag("--rate", "scale the schedule to R requests/s on average", positive, "R"),
    Flag("--length-scale", "scale prompt and output lengths by X; shared prefixes stay shared", positive),
    Flag(
        "--dequantize",
        "spread requests over the ticks of a coarse clock (default: %(default)s, where one is detected)",
        default="auto",
        choices=("auto", "off"),
    ),
    *FIT_FLAGS,
)
TRACE_FLAGS = ("trace_model", "sort", "skip_malformed", "window", "limit", "speed", "rate", "length_scale")
"""Attributes of the flags that a made-up data set has no use for."""


def add_reading_arguments(group: Any) -> None:
    """Adds the flags of `read` to a parser or a group."""
    add_flags(group, _READING_FLAGS)


def add_cutting_arguments(group: Any) -> None:
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
