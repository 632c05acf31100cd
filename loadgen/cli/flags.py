"""Flags of several verbs, and the exit status of every verb."""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum

from chairlift.service.flags import Flag, add_flag


def add_flags(group: argparse._ActionsContainer, flags: Sequence[Flag]) -> None:
    """Adds flags to a parser or a group of it; those that the parser already has are skipped."""
    for flag in flags:
        with suppress(argparse.ArgumentError):
            add_flag(group, flag)


class ExitStatus(IntEnum):
    """Exit status of every verb but 0, which means done."""

    FAILED = 2
    """A wrong flag, file or server; one line has said what to do."""
    INVALID = 3
    """`--strict`, and a run may not be quoted."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM; what there was has been reported."""
