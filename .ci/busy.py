#!/usr/bin/env python3
"""Runs a command on a machine that is kept busy: `.ci/busy.py [--processes 10] [--short 4] [--freeze 3] -- COMMAND`.

Some processes compute without a pause. Others come and go: they start, take memory, write a file, wait and end, as the
neighbours of a shared machine do. `--freeze 3` also stops processes of the command for up to two seconds, every three
seconds in the mean, as a machine does that swaps or is itself suspended (Linux only). All end with the command, whose
exit status this one returns.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

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


class Freezer:
    """Freezes a process and its descendants for 0.5 to 2 s at random moments, within the `with` block.

    Each time either all of them or a random one: a parent and its child must not rely on each other's progress.

    Args:
        root: process id.
        mean_interval_s: mean time from the end of a freeze to the next; 0 is never.
    """

    def __init__(self, root: int, mean_interval_s: float) -> None:
        self._root = root
        self._mean_interval_s = mean_interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.wait(random.expovariate(1 / self._mean_interval_s)):
            running = [process for process, state in _descendants(self._root) if state not in "TZ"]
            chosen = running if random.random() < 0.5 else random.sample(running, min(1, len(running)))
            try:
                for process in chosen:
                    _send(process, signal.SIGSTOP)
                self._is_over.wait(random.uniform(0.5, 2.0))
            finally:
                for process in chosen:
                    _send(process, signal.SIGCONT)

    def __enter__(self) -> "Freezer":
        if self._mean_interval_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._mean_interval_s:
            self._thread.join()


def _send(process: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signum)


def _descendants(root: int) -> list[tuple[int, str]]:
    """Returns the process id and the state of a process and of all its descendants."""
    states, children = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            process = int(path.parent.name)
            states[process] = state
            children.setdefault(int(parent), []).append(process)
    found, waiting = [], [root]
    while waiting:
        process = waiting.pop()
        if process in states:
            found.append((process, states[process]))
        waiting += children.get(process, [])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the command's exit status, or 128 and the number of the signal that ended it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=10, help="that compute without a pause (default: 10)")
    parser.add_argument("--short", type=int, default=4, help="that come and go, at any time (default: 4)")
    parser.add_argument(
        "--freeze",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="mean time between two freezes of the command's processes (default: 0, never)",
    )
    parser.add_argument("command", nargs="+", help="to run meanwhile")
    options = parser.parse_args(arguments)
    if min(options.processes, options.short, options.freeze) < 0:
        parser.error(
            f"--processes {options.processes}, --short {options.short}, --freeze {options.freeze}: expected numbers "
            "from 0 on"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Load(options.processes, options.short):
        try:
            command = subprocess.Popen(options.command)
        except FileNotFoundError:
            parser.error(f"{options.command[0]}: no such command")
        try:
            with Freezer(command.pid, options.freeze):
                status = command.wait()
        except BaseException:
            command.kill()
            raise
    print(f"{options.command[0]} ended with {status}; load average {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
