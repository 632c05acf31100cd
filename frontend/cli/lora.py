"""`chairlift lora`: loads, unloads and lists the LoRA adapters of a server. Exit status 0 if that was done, else 1."""

import sys
from collections.abc import Sequence

from chairlift import Client, GenerationError
from chairlift.service.flags import Flag, FlagParser, add_flag
from frontend.cli.error_line import error_line
from frontend.cli.server_options import WAIT, add_server_arguments, tls_from_arguments


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = FlagParser(
        prog="chairlift lora",
        description="Loads, unloads and lists LoRA adapters. The server must run with --allow-runtime-lora-updating, "
        "its engines with --enable-lora and --lora-dir. If it has a key for administration, that is the API key here.",
    )
    add_server_arguments(parser)
    add_flag(parser, Flag("--timeout", "seconds to wait for an answer (default: %(default)g)", WAIT, default=300.0))
    parser.add_argument("--replace", action="store_true", help="load: replace a loaded adapter of this name")
    parser.add_argument("action", choices=("load", "unload", "list"), help="load NAME PATH, unload NAME, or list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of the adapter in requests")
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="its folder on the engines' disks, in one of their --lora-dir"
    )
    arguments = parser.parse_args(argv)
    num_given = (arguments.name is not None) + (arguments.path is not None)
    if num_given != {"load": 2, "unload": 1, "list": 0}[arguments.action]:
        parser.error("give load NAME PATH, unload NAME, or list")
    tls = tls_from_arguments(parser, arguments)
    try:
        with Client(arguments.target, tls=tls) as client:
            print(_run(client, arguments.action, arguments.name, arguments.path, arguments.replace, arguments.timeout))
    except ValueError as error:
        parser.error(str(error))
    except GenerationError as error:
        print(f"chairlift lora: {error_line(error, arguments.target)}", file=sys.stderr)
        return 1
    return 0


def _run(client: Client, action: str, name: str, path: str, replace: bool, timeout_s: float) -> str:
    """Does what the command line asks for; returns what to print."""
    match action:
        case "load":
            loaded = client.load_adapter(name, path, replace=replace, timeout_s=timeout_s)
            return f"loaded {name} into {_engines(loaded.num_engines)}, digest {loaded.sha256[:12]}"
        case "unload":
            unloaded = client.unload_adapter(name, timeout_s=timeout_s)
            return f"unloaded {name} from {_engines(unloaded.num_engines)}"
        case _:
            model = client.get_model(timeout_s=timeout_s)
            return "\n".join(model.adapters) if model.adapters else f"{model.model} has no adapters"


def _engines(number: int) -> str:
    return f"{number} engine" if number == 1 else f"{number} engines"
