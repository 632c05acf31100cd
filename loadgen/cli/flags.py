"""Flags as tables: one row per flag, so that a group is declared once and can be added to several verbs."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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
