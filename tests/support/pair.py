"""A pair as processes: an engine on a unix socket and a frontend on free ports."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chairlift import Client, GenerationError, Tls
from loadgen.processes import held_port
from tests.hang import START_HANG_S

DEMO_MODEL = Path(__file__).parents[2] / "engine" / "demo" / "model"


@dataclass
class Processes:
    """Processes of one test; all are gone when it is over."""

    folder: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Runs `python -m arguments`; what it prints goes to a file of its own in the folder."""
        with (self.folder / f"{arguments[0]}-{len(self.running)}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                env={name: value for name, value in os.environ.items() if not name.startswith("CHAIRLIFT_")},
            )
        self.running.append(process)
        return process

    def log(self, process: subprocess.Popen[str]) -> str:
        """What a process has printed so far."""
        index = self.running.index(process)
        (path,) = self.folder.glob(f"*-{index}.log")
        return path.read_text()

    def stop(self) -> None:
        """Ends all of them; a process that does not react is killed."""
        for process in self.running:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.running:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def with_long_context(folder: Path, num_positions: int) -> Path:
    """Saves the demo model with a longer context, for answers that outlast whatever a test does meanwhile."""
    folder.mkdir()
    for path in DEMO_MODEL.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": num_positions}))
    return folder


@dataclass(frozen=True)
class PairAddress:
    """A running pair: where its frontend and its engine serve, and their processes."""

    target: str
    http_url: str
    engine_target: str
    engine: subprocess.Popen[str]


def wait_until_served(target: str, processes: Processes, *, api_key: str | None = None, tls: Tls | None = None) -> None:
    """Polls the model until it is served.

    Raises: AssertionError: a process has ended, or it takes too long; with what they printed.
    """
    deadline = time.monotonic() + START_HANG_S
    with Client(target, api_key=api_key, tls=tls) as client:
        while True:
            with contextlib.suppress(GenerationError):
                client.get_model(timeout_s=1.0)
                return
            logs = "\n".join(processes.log(process) for process in processes.running)
            assert all(process.poll() is None for process in processes.running), logs
            assert time.monotonic() < deadline, logs
            time.sleep(0.1)  # another process's state is polled; there is nothing to wait on


@contextlib.contextmanager
def running_pair(folder: Path, *engine_flags: str, frontend_flags: Sequence[str] = ()) -> Iterator[PairAddress]:
    """An engine and its frontend, which serves gRPC and HTTP."""
    processes = Processes(folder)
    path = folder / "engine.sock"
    with held_port() as port, held_port() as http_port:
        engine = processes.start("engine", "--uds", str(path), *engine_flags)
        ports = ("--port", str(port), "--http-port", str(http_port))
        processes.start("frontend", "--engine", f"unix:{path}", *ports, *frontend_flags)
        target = f"127.0.0.1:{port}"
        try:
            wait_until_served(target, processes)
            yield PairAddress(target, f"http://127.0.0.1:{http_port}/v1", f"unix:{path}", engine)
        finally:
            processes.stop()
