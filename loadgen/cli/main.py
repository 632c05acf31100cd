"""`chairlift-loadgen VERB ...`: finds the verb and imports only its module and dependencies.

The module of a verb has `make_parser(prog)`, with its flags, and `run(options)`, which returns the exit status.

Exit status: 0 done; 2 a wrong flag, file or server, with one line that says what to do; 3 `--strict` and the run is not
valid; 130 stopped by Ctrl-C or SIGTERM, with a report of what there was.
"""

import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from chairlift.service.standard_streams import open_closed_streams
from loadgen.cli.flags import ExitStatus
from loadgen.cli.printing import outlasting_readers
from loadgen.errors import LoadgenError
from loadgen.target.base import without_credentials

VERBS = {
    "replay": "replay a production trace, open loop",
    "run": "send a synthetic workload, open or closed loop",
    "sweep": "run a series of rates: latency, goodput, and the highest rate that meets the targets",
    "compare": "compare runs of one workload: ratios with confidence intervals",
    "ab": "run the same requests against two servers alternately",
    "report": "recompute the reports of a run from its records",
    "simulate": "simulate an engine or a fleet in virtual time: policies, goodput, how many engines",
    "trace": "inspect, convert, slice or dequantize a trace",
    "calibrate": "measure this machine's limits: messages per second, and the error of latencies",
    "mock-server": "run a server without a model, with configured latencies",
}


def main(argv: Sequence[str] | None = None, program: str = "chairlift-loadgen") -> int:
    """Runs one verb; returns the exit status. `program` is the command's name in messages."""
    open_closed_streams()
    arguments = sys.argv[1:] if argv is None else list(argv)
    with outlasting_readers(), _sigterm_is_ctrl_c():
        return _run(arguments[0] if arguments else "", arguments, program)


@contextmanager
def _sigterm_is_ctrl_c() -> Iterator[None]:
    """What ends a container or a job leaves the report that Ctrl-C leaves, and stops servers that were started."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `timeout` sends it twice; SIGKILL follows if need be
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(name: str, arguments: list[str], program: str) -> int:
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name not in VERBS:
        print(f"chairlift-loadgen: {f'unknown verb {name!r}' if name else 'which verb?'}\n{_usage()}", file=sys.stderr)
        return ExitStatus.FAILED
    try:
        module = importlib.import_module(f"loadgen.cli.{name.replace('-', '_')}")
        options = module.make_parser(f"{program} {name}").parse_args(arguments[1:])
        options.command_line = [program, *map(without_credentials, arguments)]
        status: int = module.run(options)
    except LoadgenError as error:
        print(f"{program} {name}: error: {error}", file=sys.stderr)
        return ExitStatus.FAILED
    except KeyboardInterrupt:
        print(f"{program} {name}: stopped", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    return status


def _usage() -> str:
    lines = [f"  {name:<12} {purpose}" for name, purpose in VERBS.items()]
    return "\n".join(["usage: chairlift-loadgen VERB ... (chairlift-loadgen VERB --help for its flags)", *lines])
