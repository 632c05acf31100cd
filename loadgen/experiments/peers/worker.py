"""Systems in worker processes of other programs, driven by JSON lines over pipes.

`engine.bench.worker` offers an engine without a server, `transformers` and a judge of greedy ids; the OpenVINO worker
runs in an environment of its own.
"""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from chairlift.bench.agreement import Agreement
from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload

_STOP_TIMEOUT_S = 20.0
_LOG_LINES = 15


class Worker:
    """A worker process for the length of a `with` block.

    Args:
        command: program and arguments.
        log: file for what its libraries print.
    """

    def __init__(self, command: Sequence[str | Path], log: Path) -> None:
        self._name = log.stem
        self._log = log
        with log.open("w") as errors:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.pid = self._popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended without reading the last request
            self._popen.stdin.close()  # ends it
        try:
            self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()

    def call(self, call: str, **arguments: object) -> dict[str, Any]:
        """Sends one request and returns its answer.

        Raises: BenchmarkError: the worker reports a failure, or has ended.
        """
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            self._popen.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            last = "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise BenchmarkError(f"the worker {self._name} ended during {call!r}{self._signal()}:\n{last}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"the worker {self._name} failed at {call!r}:\n{answer['error']}")
        return answer

    def _signal(self) -> str:
        """Returns the signal that ended the process, for a message; empty if there is none."""
        try:
            status = self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" by {signal.strsignal(-status) or f'signal {-status}'}" if status < 0 else ""


class WorkerSystem:
    """What a worker has loaded, as a system under test.

    Attributes:
        batches: columns and steps of each padded batch of the last run, where the way has any.
    """

    def __init__(self, worker: Worker, **arguments: object) -> None:
        """Binds a system to its worker; arguments are sent with every call of `generate`."""
        self._worker = worker
        self._arguments = arguments
        self.batches: list[tuple[int, int]] = []

    def generate(self, workload: Workload) -> Run:
        """See `System.generate`."""
        answer = self._worker.call(
            "generate", prompts=workload.prompts, max_tokens=workload.max_tokens, **self._arguments
        )
        self.batches = [(positions, steps) for positions, steps in answer.get("batches", ())]
        return Run(
            output_ids=_tuples(answer["token_ids"]),
            token_times_s=_tuples(answer["token_times_s"]),
            arrivals_s=(0.0,) * len(workload.prompts),
            steps=(),
            wall_s=answer["wall_s"],
        )

    @property
    def pids(self) -> frozenset[int]:
        """See `System.pids`."""
        return frozenset({self._worker.pid})


class BenchWorker(Worker):
    """`engine.bench.worker`: loads at most one engine and one model of `transformers`.

    Args:
        log: file for what its libraries print; its stem names the worker in errors.
    """

    def __init__(self, log: Path) -> None:
        super().__init__([sys.executable, "-m", "engine.bench.worker"], log)

    def save_checkpoint(self, shape: str, folder: Path, dtype: str = "float32") -> Path:
        """Saves a random checkpoint, the same numbers in any dtype but for rounding; returns its folder in `folder`."""
        return Path(self.call("checkpoint", shape=shape, folder=str(folder), dtype=dtype)["path"])

    def save_gguf(self, checkpoint: Path, out: Path, kind: str) -> None:
        """Writes a checkpoint as a GGUF file with matrices in F32, F16 or BF16."""
        self.call("gguf", checkpoint=str(checkpoint), out=str(out), type=kind)

    def save_twin(self, gguf: Path, checkpoint: Path, out: Path) -> None:
        """Writes the numbers that a GGUF file stands for as a checkpoint; `checkpoint` is the one it was made of."""
        self.call("twin", gguf=str(gguf), checkpoint=str(checkpoint), out=str(out))

    def load_engine(self, flags: Sequence[str]) -> WorkerSystem:
        """Loads an engine, which answers in the worker without threads or sockets."""
        self.call("engine", flags=list(flags))
        return WorkerSystem(self, way="engine")

    def load_transformers(self, model_dir: Path, threads: int, dtype: str = "float32") -> None:
        """Loads a checkpoint, for `streaming`, `batches`, `continuous` and, in float32, `judge`."""
        self.call("transformers", model=str(model_dir), threads=threads, dtype=dtype)

    def streaming(self) -> WorkerSystem:
        """`generate` on one request after the other."""
        return WorkerSystem(self, way="streaming")

    def batches(self, batch_size: int) -> WorkerSystem:
        """`generate` on static batches, padded on the left."""
        return WorkerSystem(self, way="batches", batch_size=batch_size)

    def continuous(self, workload: Workload) -> WorkerSystem:
        """Its continuous batching, with a cache for the workload."""
        self.call("continuous", prompts=workload.prompts, max_tokens=workload.max_tokens)
        return WorkerSystem(self, way="continuous")

    def judge(self, workload: Workload, output_ids: Sequence[Sequence[int]]) -> Agreement:
        """Compares greedy answers with the model's own choices."""
        return Agreement(**self.call("judge", prompts=workload.prompts, output_ids=output_ids))


def _tuples(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, rows))
