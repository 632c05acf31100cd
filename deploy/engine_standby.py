"""Runs an engine until another one answers at some address, then drains it and stands by.

    engine_standby.py HOST:PORT COMMAND...

Compose starts services without a profile always: under `--profile gpu` the engine on the CPU comes up beside the one on
the GPU, in an order that nobody knows, and has to give way. It does not end then, because whoever waits for it would
take that for a failure. Standing by lasts until the container ends.
"""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

WATCH_S = 3.0
CONNECT_TIMEOUT_S = 1.0


def main(argv: Sequence[str], *, watch_s: float = WATCH_S) -> int:
    """Returns the exit status of the command, or 0 after standing by."""
    address, *command = argv
    must_end = threading.Event()
    engine: subprocess.Popen[bytes] | None = None

    def end(signal_number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature is fixed
        must_end.set()
        if engine is not None:
            engine.send_signal(signal_number)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, end)
    if not _answers(address):
        engine = subprocess.Popen(command)
        while True:
            try:
                return _exit_status(engine.wait(watch_s))
            except subprocess.TimeoutExpired:
                if must_end.is_set() or not _answers(address):
                    continue
            engine.terminate()
            engine.wait()
            break
    if not must_end.is_set():
        print(f"an engine answers at {address}: this one stands by", flush=True)
    must_end.wait()
    return 0


def _exit_status(return_code: int) -> int:
    if return_code == -signal.SIGKILL:  # nobody can say a word of his own then
        print("the engine was killed: if nobody did it, it needed more memory than ENGINE_MEMORY allows", flush=True)
    return 128 - return_code if return_code < 0 else return_code


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
    except OSError:  # the name is unknown, as without the profile, or nobody listens yet
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
