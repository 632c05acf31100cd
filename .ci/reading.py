#!/usr/bin/env python3
"""Counts what there is to read to understand one request: `.ci/reading.py [--trace]`.

Without arguments it counts packages. With --trace it also starts an engine and a frontend, on the demo model and a CPU,
streams completions, and counts the files of which a function was called in either process during each of them: what a
process does besides, such as the rest of its start, is in some of them only. Lines are all
lines of a file, as `wc -l` counts them; code is neither documentation nor blank. The trace does not see generated
stubs, nor compiled kernels, which run without Python once a step is recorded.
"""

import argparse
import ast
import contextlib
import io
import os
import socket
import subprocess
import sys
import tempfile
import time
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from chairlift import Client

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ("engine", "frontend", "kernels", "protos/chairlift")

# An afternoon: what decides when a request runs, and runs it.
CORE = ("engine/core",)
HEART = ("engine/core", "engine/step_loop.py", "engine/runner", "engine/model")

# Completions that are traced, and the pause after each: a start is over before the last of them.
_NUM_TRACED = 10
_PAUSE_S = 0.3

# Notes, for each source file, in which twentieths of a second one of its functions was called.
_RECORDER = """
import atexit, os, sys, threading, time
seen, monotonic = set(), time.monotonic
def note(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        seen.add((frame.f_code.co_filename, int(monotonic() * 20)))
def write():
    with open(os.path.join({folder!r}, str(os.getpid())), "w") as file:
        file.writelines(f"{{tick}} {{name}}\\n" for name, tick in list(seen))
atexit.register(write)
threading.setprofile(note)
sys.setprofile(note)
"""


class Count(NamedTuple):
    """Lines of files; `code` are those that are neither documentation nor blank."""

    files: int
    lines: int
    code: int


def count(path: Path) -> Count:
    """Lines of one file."""
    source = path.read_text()
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    num_lines = len(source.splitlines())
    filled = {
        number
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
        for number in range(token.start[0], token.end[0] + 1)
        if number <= num_lines
    }
    return Count(1, num_lines, len(filled - documented))


def files_of(places: Iterable[str]) -> list[Path]:
    """The Python files of folders and files, tests' doubles and benchmarks left out."""
    found = [
        path for place in places for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    return sorted(path for path in found if _is_served(path))


def _is_served(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    aside = {"bench", "testing", "train", "v1"} & {part.partition("_")[0] for part in parts}
    return parts[0] in {name.split("/")[0] for name in PROGRAMS} and not aside


def total(paths: Iterable[Path]) -> Count:
    """Lines of several files."""
    return Count(*map(sum, zip(*map(count, paths), strict=True)))


@contextlib.contextmanager
def _program(name: str, port: int, folder: Path, *arguments: str) -> Iterator[int]:
    """Runs a program; yields its process ID."""
    path = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "protos")])
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            # Without throughput lines, which a slow completion may contain and a quick one does not.
            [sys.executable, "-m", name, "--port", str(port), "--log-stats-interval", "0", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(300)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def trace() -> list[Path]:
    """The files that one completion passes through: called while it was streamed, whichever one it was."""
    sys.path[:0] = [str(ROOT), str(ROOT / "protos")]
    from chairlift import Client

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seen = folder / "seen"
        seen.mkdir()
        (folder / "sitecustomize.py").write_text(_RECORDER.format(folder=str(seen)))
        ports = _free_port(), _free_port()
        link = ("--engine", f"127.0.0.1:{ports[0]}", "--http-port", str(_free_port()))
        with (
            _program("engine", ports[0], folder) as engine,
            _program("frontend", ports[1], folder, *link) as frontend,
            Client(f"127.0.0.1:{ports[1]}") as client,
        ):
            _complete(client)  # starts what starts with the first request
            windows = []
            for _ in range(_NUM_TRACED):
                first = _tick()
                _complete(client)
                windows.append(range(first, _tick() + 1))
                time.sleep(_PAUSE_S)
        # Not the children of either process, which check tokenizers and schemas in advance.
        lines = [line for pid in (engine, frontend) for line in (seen / str(pid)).read_text().splitlines()]
    calls = [line.split(maxsplit=1) for line in lines]
    names = set.intersection(*({path for tick, path in calls if int(tick) in window} for window in windows))
    return sorted(path for name in names if (path := Path(name)).is_relative_to(ROOT) and _is_served(path))


def _tick() -> int:
    """The twentieth of a second that it is, as the recorder counts them."""
    return int(time.monotonic() * 20)


def _complete(client: "Client") -> None:
    """Streams one completion, once the engine serves."""
    from chairlift import GenerationError

    deadline = time.monotonic() + 600  # the engine may compile all CPU kernels first
    while True:
        try:
            for _ in client.stream("Once upon a time", max_tokens=16, seed=1, stop_texts=["no such text"]):
                pass
            return
        except GenerationError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="store_true", help="also count the files that one completion passes through")
    options = parser.parse_args(arguments)

    def show(name: str, row: Count) -> None:
        print(f"{row.files:5} {row.lines:7,} {row.code:7,}  {name}")

    print(f"{'files':>5} {'lines':>7} {'code':>7}")
    show("engine/core", total(files_of(CORE)))
    show(" + ".join(HEART), total(files_of(HEART)))
    if options.trace:
        show("files that one completion passes through, in both processes", total(trace()))
    show("frontend, engine, kernels and chairlift, all that serves", total(files_of(PROGRAMS)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
