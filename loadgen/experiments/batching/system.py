"""One engine with one policy, and how it runs a case."""

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from chairlift.bench.workload import Workload
from loadgen.errors import ResultError
from loadgen.experiments.batching.barrier import behind_barriers, only_barriers, with_barriers
from loadgen.experiments.batching.case_run import CaseRun, case_run_of, require_whole_answers
from loadgen.experiments.batching.cases import Case, prompts_of
from loadgen.experiments.batching.model import Model
from loadgen.experiments.batching.policies import ENGINE_FLAGS
from loadgen.experiments.batching.step_log import read_steps
from loadgen.experiments.client import Client
from loadgen.experiments.pair import Pair
from loadgen.record import RunData
from loadgen.run.controller import RunOptions, run_workload
from loadgen.step_log import Step
from loadgen.target.base import TargetSpec
from loadgen.trace.schema import Trace

Answers = tuple[tuple[int, ...], ...]
RunTrace = Callable[[Trace, str, str], RunData]
"""Runs a trace against HOST:PORT with prompts of a salt, from the moment it is called; see `run_trace`."""

_DRAIN_TIMEOUT_S = 1800.0
_MAX_STEP_TOKENS = 2048
_CALIBRATION_BARRIERS = 4
_LOG_TIMEOUT_S = 20.0
_POLL_S = 0.02
_ATTEMPTS = 3
# Every case fits at once, without backpressure from a client that reads late: the queue is part of the experiment.
_FRONTEND_FLAGS = (
    *("--no-reflection", "--max-queued-requests", str(1 << 16)),
    *("--max-queued-tokens", str(1 << 24), "--token-window", str(1 << 16)),
)


def run_trace(trace: Trace, address: str, salt: str) -> RunData:
    """Runs a trace with the load generator, from one process, so that requests leave in their order.

    Args:
        trace: arrivals from 0.
        address: HOST:PORT.
        salt: of the prompts.
    Raises: TargetError: the server cannot be reached.
    """
    options = RunOptions(workers=1, salt=salt, drain_timeout_s=_DRAIN_TIMEOUT_S)
    return run_workload(trace, TargetSpec(url=f"grpc://{address}"), options)


@dataclass(frozen=True, slots=True)
class EngineSize:
    """What all systems' engines have in common.

    Attributes:
        model: what they load.
        num_slots: `--max-num-seqs`.
        max_model_len: most tokens of prompt and answer.
        step_tokens: token budget of a step.
    """

    model: Model
    num_slots: int
    max_model_len: int
    step_tokens: int

    @classmethod
    def of(cls, model: Model, num_slots: int, prompt_tokens: int, longest: int) -> "EngineSize":
        """Room for requests of `longest` tokens, and a step that takes all prompts of a batch if they are short."""
        step_tokens = min(num_slots * prompt_tokens, _MAX_STEP_TOKENS, model.max_model_len // 2)
        return cls(model, num_slots, min(model.max_model_len, max(longest, step_tokens + 2)), step_tokens)

    @property
    def barrier_tokens(self) -> int:
        """A prompt that fills whole steps, as many as fit."""
        return (self.max_model_len - 1) // self.step_tokens * self.step_tokens

    def flags(self) -> tuple[str, ...]:
        """Of the engine."""
        numbers = {
            "--max-num-seqs": self.num_slots,
            "--max-num-batched-tokens": self.step_tokens,
            "--max-model-len": self.max_model_len,
        }
        return (*self.model.flags, *(str(part) for item in numbers.items() for part in item))


class System:
    """A running pair. Use it in a `with` block, and call `wait_until_served` before anything else.

    Attributes:
        name: a key of ENGINE_FLAGS.
    """

    def __init__(self, name: str, size: EngineSize, folder: Path, run_trace: RunTrace) -> None:
        self.name = name
        self._size = size
        self._run_trace = run_trace
        self._step_log = folder / "steps.jsonl"
        flags = (*size.flags(), *ENGINE_FLAGS[name], "--step-log", str(self._step_log))
        self._pair = Pair(flags, folder, frontend_flags=_FRONTEND_FLAGS)
        self._read_to = 0

    def __enter__(self) -> Self:
        self._pair.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._pair.__exit__()

    def wait_until_served(self) -> None:
        """Raises TargetError: see `Pair`."""
        self._pair.wait_until_served()

    def answers(self, case: Case) -> Answers:
        """The ids of every answer of a case."""
        prompts = tuple(prompts_of(case.trace, self._pair.model.vocab_size))
        with Client(self._pair.address) as client:
            streams = client.streams(Workload(prompts, tuple(case.trace.output_tokens.tolist())))
        self._steps_of(case.trace)
        return tuple(stream.token_ids for stream in streams)

    def seconds_per_barrier(self) -> float:
        """How long one barrier holds this engine back, at the mean."""
        barriers = only_barriers(_CALIBRATION_BARRIERS, self._size.barrier_tokens)
        require_whole_answers(self._run_trace(barriers, self._pair.address, secrets.token_hex(8)))
        return sum(step.busy_ms for step in self._steps_of(barriers)) / 1e3 / len(barriers)

    def run_trace(self, case: Case, num_barriers: int) -> CaseRun:
        """Runs a case once, with fresh prompts.

        Args:
            case: behind barriers if its requests are to be queued at once.
            num_barriers: to begin with; if they are too few, twice as many are tried.
        Raises: ResultError: see `case_run_of`, or no number of barriers was enough.
        """
        num_barriers = num_barriers if case.is_queued else 0
        for _ in range(_ATTEMPTS):
            trace = with_barriers(case.trace, num_barriers, self._size.barrier_tokens) if num_barriers else case.trace
            cpu_before_s = self._pair.frontend.cpu_s()
            run = self._run_trace(trace, self._pair.address, secrets.token_hex(8))
            cpu_s = self._pair.frontend.cpu_s() - cpu_before_s
            require_whole_answers(run)
            steps = behind_barriers(self._steps_of(trace), num_barriers, len(case.trace))
            if steps is not None:
                return case_run_of(run, num_barriers, steps, self._size.num_slots, cpu_s)
            num_barriers *= 2
        raise ResultError(
            f"{self.name}, {case.key}: requests still arrived after {num_barriers // 2} barrier prompts of "
            f"{self._size.barrier_tokens} tokens; check for other load on the machine"
        )

    def _steps_of(self, trace: Trace) -> list[Step]:
        """The steps of a trace that has just been run, once its last request has finished in the log.

        Whatever ran before it since the last call (the load generator warms its connections up) is left out.
        """
        steps: list[Step] = []
        requested = Counter(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
        deadline_s = time.monotonic() + _LOG_TIMEOUT_S
        while True:
            new_steps, self._read_to = read_steps(self._step_log, self._read_to)
            steps += new_steps
            finished = {request: usage for step in steps for request, usage in step.finished.items()}
            missing = requested - Counter((usage.prompt, usage.output) for usage in finished.values())
            if not missing:
                first = sorted(finished)[-len(trace)]
                return [step for step in steps if max(step.rows) >= first]
            if time.monotonic() > deadline_s:
                raise ResultError(
                    f"step log {self._step_log}: {missing.total()} of {len(trace)} requests do not finish in it"
                )
            time.sleep(_POLL_S)
