"""`chairlift COMMAND ...`: finds the command and imports it alone, so that one command's needs are not another's."""

import chairlift.service.silent_grpc  # noqa: F401 - before grpc

# isort: split
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "up": "run an engine and a frontend together",
    "generate": "generate text, streamed to standard output",
    "health": "say whether a server takes requests, and its model",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        module = importlib.import_module(f"frontend.cli.{name}")
        try:
            status: int = module.main(arguments[1:])
            sys.stdout.flush()
        except BrokenPipeError:  # the reader (`| head`) has what it wants; the interpreter must not flush once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        return status
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    complaint = f"unknown command {name!r}" if name else "which command?"
    print(f"chairlift: {complaint}\n{_usage()}", file=sys.stderr)
    return 2


def _usage() -> str:
    lines = [f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(["usage: chairlift COMMAND ... (chairlift COMMAND --help for its flags)", *lines])


if __name__ == "__main__":
    sys.exit(main())
