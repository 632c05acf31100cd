"""The command line's frame: exit status, parser, and flags as tables.

A table has one row per flag, so that a group of flags is declared once and can be added to several verbs.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from chairlift.service.flags import unknown_flags
from loadgen.cli.values import at_least_one, duration_s, positive, share, slo

_METAVARS: dict[Callable[[str], Any], str] = {
    at_least_one: "N",
    duration_s: "DURATION",
    positive: "X",
    share: "SHARE",
    slo: "METRIC:MS",
    Path: "FILE",
    int: "N",
}


class Flag(NamedTuple):
    """One flag.

    Attributes:
        name: such as "--workers".
        help: what it sets, its unit and its default.
        parse: makes a value of a text. `bool` is a switch; one that is on by default also gets `--no-NAME`.
        metavar: the value in the help; "" is the usual one of `parse`.
        default: the value without the flag.
        choices: the values to choose from; None allows all.
        more: further arguments of `add_argument`, such as nargs.
    """

    name: str
    help: str
    parse: Callable[[str], Any] = str
    metavar: str = ""
    default: Any = None
    choices: Sequence[str] | None = None
    more: Mapping[str, Any] = {}


def add_flags(group: Any, flags: Sequence[Flag]) -> None:
    """Adds flags to a parser or a group of it; those that the parser already has are skipped."""
    for flag in flags:
        arguments: dict[str, Any]
        if flag.parse is bool:
            action = argparse.BooleanOptionalAction if flag.default else "store_true"
            arguments = {"action": action, "default": bool(flag.default)}
        else:
            metavar = None if flag.choices else flag.metavar or _METAVARS.get(flag.parse)
            arguments = {"type": flag.parse, "default": flag.default, "choices": flag.choices, "metavar": metavar}
        with suppress(argparse.ArgumentError):
            group.add_argument(flag.name, help=flag.help, **arguments, **flag.more)


SEVERAL: Mapping[str, Any] = {"nargs": "+", "action": "extend"}
"""`more` of a flag that takes several values, in one place of the command line or in several."""


class ExitStatus(IntEnum):
    """Exit status of every verb but 0, which means done."""

    FAILED = 2
    """A wrong flag, file or server; one line has said what to do."""
    INVALID = 3
    """`--strict`, and a run may not be quoted."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; what there was has been reported."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports a mistake in two lines: usage, and the flag that may have been meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As usual, but what is unknown is refused here, where the flags of the verb are known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_flags(self, unknown))
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and ends with status 2."""
        print(f"usage: {self.prog} ... ({self.prog} --help for its flags)", file=sys.stderr)
        self.exit(ExitStatus.FAILED, f"{self.prog}: error: {message}\n")
