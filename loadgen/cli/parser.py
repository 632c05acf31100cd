"""What a wrong flag gets: a line of usage, the complaint, and the flag that may have been meant."""

import argparse
import sys
from typing import Any, NoReturn

from chairlift.service.flags import unknown_flags
from loadgen.cli.exit_status import ExitStatus


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that complains in two lines; the whole list of flags is for `--help`."""

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
