"""`trace`: look at a trace, turn it into our own form, cut a piece out, or spread its clock."""

import argparse
from pathlib import Path

from chairlift.service.flags import FlagParser
from loadgen.cli.trace_options import add_cutting_arguments, add_reading_arguments, read, transformed
from loadgen.cli.workload_text import describe, inspect
from loadgen.errors import OptionError
from loadgen.trace.jsonl import write_jsonl
from loadgen.trace.schema import Trace
from loadgen.trace.window import dequantize


def make_parser(prog: str) -> FlagParser:
    """Returns the parser of the verb and its own verbs."""
    parser = FlagParser(prog)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, action, what in (
        ("inspect", _inspect, "print the statistics of a trace"),
        ("convert", _convert, "write a trace as JSON lines, every request as it is"),
        ("slice", _slice, "write a part of a trace, cut and scaled as `replay` would run it"),
        ("dequantize", _dequantize, "write a trace with requests spread over the ticks of its coarse clock"),
    ):
        verb = verbs.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
        verb.add_argument("file", type=Path, help="azure, mooncake, burstgpt, bailian, servegen or jsonl; .gz too")
        if name != "inspect":
            verb.add_argument("out", type=Path, help="file to write, NAME.jsonl or NAME.jsonl.gz")
        add_reading_arguments(verb)
        if name == "slice":
            add_cutting_arguments(verb)
        verb.set_defaults(action=action)
    return parser


def run(options: argparse.Namespace) -> int:
    """Does what the verb's own verb says; returns the exit status."""
    status: int = options.action(options)
    return status


def _inspect(options: argparse.Namespace) -> int:
    print(inspect(read(options.file, options)))
    return 0


def _convert(options: argparse.Namespace) -> int:
    return _write(read(options.file, options), options)


def _slice(options: argparse.Namespace) -> int:
    return _write(transformed(read(options.file, options), options), options)


def _dequantize(options: argparse.Namespace) -> int:
    return _write(dequantize(read(options.file, options), options.seed), options)


def _write(trace: Trace, options: argparse.Namespace) -> int:
    if options.out.exists() and options.out.samefile(options.file):
        raise OptionError(f"{options.out} is the file that is read; name another one")
    write_jsonl(trace, options.out)
    print(f"{describe(trace)}\n{'written':<10} {options.out}")
    return 0
