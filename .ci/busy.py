#!/usr/bin/env python3
"""Runs a command on a machine that is kept busy: `.ci/busy.py [--processes 10] [--short 4] -- COMMAND ...`.

Some processes compute without a pause. Others come and go: they start, take memory, write a file, wait and end, as the
neighbours of a shared machine do. All end with the command, whose exit status this one returns.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_STEADY = "x = 1.0\nwhile True: x = x * 1.0000001 % 7"
_SHORT = """
import random, tempfile, time
memory = bytearray(random.randrange(1, 100) << 20)
with tempfile.TemporaryFile() as file:
    file.write(memory[: 4 << 20])
end_s = time.process_time() + random.expovariate(1.0)
while time.process_time() < end_s:
    for i in range(0, len(memory), 4096):
        memory[i] = 1
time.sleep(random.expovariate(2.0))
"""


def _start(code: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Load:
    """Processes that keep the machine busy, within the `with` block.

    Args:
        num_steady: that never pause.
        num_short: at any time, of those that come and go; each is replaced when it ends.
    """

    def __init__(self, num_steady: int, num_short: int) -> None:
        self._steady = [_start(_STEADY) for _ in range(num_steady)]
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._come_and_go) for _ in range(num_short)]
        for thread in self._threads:
            thread.start()

    def _come_and_go(self) -> None:
        while not self._is_over.wait(random.expovariate(2.0)):
            process = _start(_SHORT)
            while process.poll() is None:
                if self._is_over.wait(0.1):
                    process.kill()
            process.wait()

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for process in self._steady:
            process.kill()
        for process in self._steady:
            process.wait()
        for thread in self._threads:
            thread.join()


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the command's exit status, or 128 and the number of the signal that ended it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10, help="that compute without a pause (default: 10)")
    parser.add_argument("--short", type=int, default=4, help="that come and go, at any time (default: 4)")
    parser.add_argument("command", nargs="+", help="to run meanwhile")
    options = parser.parse_args(arguments)
    if options.processes < 0 or options.short < 0:
        parser.error(f"--processes {options.processes}, --short {options.short}: expected numbers from 0 on")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Load(options.processes, options.short):
        try:
            status = subprocess.run(options.command, check=False).returncode
        except FileNotFoundError:
            parser.error(f"{options.command[0]}: no such command")
    print(f"{options.command[0]} ended with {status}; load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
