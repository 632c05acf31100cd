"""What a wrong flag gets: a line of usage, the complaint, and the flag that may have been meant."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from loadgen.cli.exit_status import ExitStatus


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that complains in two lines; the whole list of flags is for `--help`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As usual, but what is unknown is refused here, where the flags of the verb are known."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {' '.join(unknown)}{self._meant(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        """Says what is wrong and ends with status 2."""
        print(f"usage: {self.prog} ... ({self.prog} --help for its flags)", file=sys.stderr)
        self.exit(ExitStatus.FAILED, f"{self.prog}: error: {message}\n")

    def _meant(self, unknown: Sequence[str]) -> str:
        flags = [text.partition("=")[0] for text in unknown if text.startswith("--")]
        known = [name for action in self._actions for name in action.option_strings]
        near = [name for flag in flags for name in difflib.get_close_matches(flag, known, 1, 0.7)]
        return f"; did you mean {', '.join(dict.fromkeys(near))}?" if near else ""
