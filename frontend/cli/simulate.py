"""`chairlift simulate`: runs the load generator's verb of that name.

It is found by its name, so that frontend and load generator import each other nowhere; this module only starts it.
"""

import importlib
import sys
from collections.abc import Sequence

_OURS = ("loadgen", "engine", "frontend", "chairlift")


def main(argv: Sequence[str]) -> int:
    """Simulates; returns the exit status: 2 if a flag or file is wrong or the extra `loadgen` is not installed."""
    try:
        status: int = importlib.import_module("loadgen.cli.main").main(["simulate", *argv], "chairlift")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in _OURS:
            raise
        print(f"chairlift simulate: {error.name} is missing; install chairlift[loadgen]", file=sys.stderr)
        return 2
    return status
