"""Flags that read, cut and scale a trace, and their order."""

import argparse
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from loadgen.cli.values import at_least_one, duration_s, positive
from loadgen.errors import OptionError
from loadgen.trace.formats import ReadOptions
from loadgen.trace.reader import FORMATS, read_trace
from loadgen.trace.schema import Trace
from loadgen.trace.window import at_rate, at_speed, cut, dequantize, fit, from_zero, limit, scale_lengths, tick_s


def add_reading_arguments(group: Any) -> None:
    """Adds the flags of `read` to a parser or a group."""
    group.add_argument(
        "--trace-format",
        choices=FORMATS,
        default="auto",
        help="format of the file (default: %(default)s, from its first line)",
    )
    group.add_argument("--trace-model", default="", metavar="NAME", help="keep only requests to this model (burstgpt)")
    group.add_argument("--sort", action="store_true", help="sort rows by arrival where timestamps are out of order")
    group.add_argument("--skip-malformed", action="store_true", help="skip and count malformed rows")
    add_seed_argument(group)


def add_cutting_arguments(group: Any) -> None:
    """Adds the flags of `transformed` to a parser or a group."""
    group.add_argument(
        "--window",
        type=_window_s,
        metavar="FROM:TO",
        help="keep only this part of the trace, such as 600:1200, 10m:20m or 10m:",
    )
    group.add_argument(
        "--limit", type=at_least_one, metavar="N", help="keep only the first N of the remaining requests"
    )
    group.add_argument(
        "--speed", type=positive, metavar="X", help="speed up the schedule by X: 2 sends 10 min in 5 min"
    )
    group.add_argument("--rate", type=positive, metavar="R", help="scale the schedule to R requests/s on average")
    group.add_argument(
        "--length-scale",
        type=positive,
        metavar="X",
        help="scale prompt and output lengths by X; shared prefixes stay shared",
    )
    group.add_argument(
        "--dequantize",
        choices=("auto", "off"),
        default="auto",
        help="spread requests over the ticks of a coarse clock (default: %(default)s, where one is detected)",
    )
    add_fit_arguments(group)


def add_fit_arguments(group: Any) -> None:
    """Adds the flags of `fitted`, unless they are there."""
    with suppress(argparse.ArgumentError):
        group.add_argument(
            "--max-model-len",
            type=at_least_one,
            metavar="L",
            help="maximum tokens of prompt and answer together (default: no limit)",
        )
        group.add_argument(
            "--overlong",
            choices=("drop", "clip", "fail"),
            help="drop and count, clip, or refuse requests over --max-model-len (default: drop)",
        )


def add_seed_argument(group: Any) -> None:
    """Adds `--seed`, unless it is there."""
    with suppress(argparse.ArgumentError):
        group.add_argument("--seed", type=_seed, default=0, metavar="N", help="random seed (default: %(default)s)")


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
    """Cuts and scales as the flags say; arrivals from 0.

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
    """Fits requests to the context as the flags say.

    Raises: OptionError: see `fit`; or `--overlong` without `--max-model-len`.
    """
    if options.max_model_len is None:
        if options.overlong is not None:
            raise OptionError(f"--overlong {options.overlong} needs --max-model-len to say what is too long")
        return trace
    return fit(trace, options.max_model_len, options.overlong or "drop")


def _window_s(text: str) -> tuple[float, float]:
    start, colon, end = text.partition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} is not a window such as 600:1200, 10m:20m or 10m:")
    return duration_s(start) if start else 0.0, duration_s(end) if end else inf


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)
