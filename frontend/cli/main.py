"""`chairlift COMMAND ...`: imports only the module of the command, so that each starts fast."""

import chairlift.service.silent_grpc  # noqa: F401 - before grpc

# isort: split
import importlib
import io
import sys
from collections.abc import Sequence

from chairlift.service.logs import discard_stdout
from chairlift.service.standard_streams import open_closed_streams

COMMANDS = {
    "up": "run an engine and a frontend together, on this machine",
    "generate": "generate text and stream it to standard output",
    "health": "show whether a server accepts requests, its model and limits",
    "simulate": "simulate an engine or a fleet in virtual time: policies, goodput, how many engines",
    "lora": "load, unload and list the LoRA adapters of a server",
}


_ELSEWHERE = {"serve": "up --model MODEL"}
"""Commands of other servers, and what they are here."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    open_closed_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    name = arguments[0] if arguments else ""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer does not end at a character that a locale lacks
    if name in COMMANDS:
        try:
            module = importlib.import_module(f"frontend.cli.{name}")
            status: int = module.main(arguments[1:])
            sys.stdout.flush()
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # the reader (`| head`) has closed the pipe; the interpreter must not flush again
            discard_stdout()
            return 1
        except OSError as error:
            if error.filename is not None:
                raise
            discard_stdout()
            print(f"chairlift {name}: cannot write to standard output: {error.strerror}", file=sys.stderr)
            return 1
        return status
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    problem = f"unknown command {name!r}" if name else "no command given"
    if name in _ELSEWHERE:
        problem += f"; did you mean `chairlift {_ELSEWHERE[name]}`?"
    print(f"chairlift: {problem}\n{_usage()}", file=sys.stderr)
    return 2


def _usage() -> str:
    lines = [f"  {name:<10} {purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(["usage: chairlift COMMAND ... (chairlift COMMAND --help for its flags)", *lines])


if __name__ == "__main__":
    sys.exit(main())
