"""Our end of the worker: a process of another interpreter, asked by JSON lines."""

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload
from engine.bench.serve import Run

_SCRIPT = Path(__file__).with_name("worker.py")
_STOP_TIMEOUT_S = 20.0
_LOG_LINES = 15


class OpenVinoProcess:
    """A worker for the length of a `with` block.

    Args:
        python: its interpreter.
        log: file for what its libraries print.
        script: another worker, in tests.
    """

    def __init__(self, python: Path, log: Path, *, script: Path = _SCRIPT) -> None:
        self._log = log
        with log.open("w") as errors:
            # -I: neither our packages nor this folder, which is called openvino, are on its path.
            self._popen = subprocess.Popen(
                [python, "-I", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and did not read the last request
            self._popen.stdin.close()  # it ends by itself
        try:
            self._popen.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()

    def load(
        self, name: str, model_dir: Path, *, properties: Mapping[str, object], scheduler: Mapping[str, object]
    ) -> "OpenVinoPipeline":
        """Loads a pipeline, which stays until the worker ends.

        Args:
            name: to tell pipelines apart.
            model_dir: a converted checkpoint.
            properties: of the CPU plug-in.
            scheduler: fields of SchedulerConfig.
        Raises: BenchmarkError: it cannot be loaded.
        """
        self.call(call="load", name=name, model=str(model_dir), properties=dict(properties), scheduler=dict(scheduler))
        return OpenVinoPipeline(self, name)

    def call(self, **request: object) -> dict[str, Any]:
        """One request, one answer.

        Raises: BenchmarkError: the worker says why not, or has ended.
        """
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            self._popen.stdin.write(json.dumps(request) + "\n")
            self._popen.stdin.flush()
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise BenchmarkError(f"the OpenVINO worker ended during {request['call']!r}:\n{self._last_lines()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchmarkError(f"the OpenVINO worker failed at {request['call']!r}:\n{answer['error']}")
        return answer

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._popen.pid

    def _last_lines(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


class OpenVinoPipeline:
    """One loaded pipeline as a contender."""

    def __init__(self, process: OpenVinoProcess, name: str) -> None:
        self._process = process
        self._name = name

    def generate(self, workload: Workload) -> Run:
        """See `Contender.generate`."""
        answer = self._process.call(
            call="generate", name=self._name, prompts=workload.prompts, max_tokens=workload.max_tokens
        )
        return Run(
            output_ids=_tuples(answer["token_ids"]),
            token_times_s=_tuples(answer["token_times_s"]),
            arrivals_s=(0.0,) * len(workload.prompts),
            steps=(),
            wall_s=answer["wall_s"],
        )

    @property
    def pids(self) -> frozenset[int]:
        """See `Contender.pids`."""
        return frozenset({self._process.pid})


def _tuples(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, rows))
