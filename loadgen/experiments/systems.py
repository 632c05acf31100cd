"""Compares systems under test: they answer the same requests in turn and stay loaded while the others run."""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from chairlift.bench.agreement import Agreement, require_same_ids
from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from loadgen.processes import cpu_s

# Share of int8's greedy choices that are fp32's, after the same tokens. Random weights spread the logits of the best
# tokens less than trained ones, so many choices are close; below this the quantized model is another model.
_MIN_INT8_SHARE = 0.5


class System(Protocol):
    """A loaded system under test."""

    def generate(self, workload: Workload) -> Run:
        """Answers all requests, sent at once: greedy, each to its full length ignoring end tokens."""
        ...

    @property
    def pids(self) -> frozenset[int]:
        """Its processes; two systems may share one."""
        ...


@dataclass(frozen=True, slots=True)
class Comparison:
    """Results of a comparison.

    Attributes:
        samples: seconds per round, by system.
        runs: the same rounds in full.
        cpu_s: CPU seconds of the same rounds, by system: of its processes and of this one, where the client runs.
        idle_cores: by system, the cores it used while systems in other processes ran.
    """

    samples: Samples
    runs: Mapping[str, tuple[Run, ...]]
    idle_cores: Mapping[str, float]
    cpu_s: Mapping[str, tuple[float, ...]]

    def best_run(self, name: str) -> Run:
        """The round of a system's best sample."""
        values = self.samples.raw[name]
        return self.runs[name][values.index(min(values))]

    def raw(self) -> dict[str, object]:
        """Raw samples for the report."""
        return {
            "seconds": self.samples.raw,
            "ttft_s": {name: [ttfts_s(run) for run in runs] for name, runs in self.runs.items()},
            "tpot_s": {name: [tpot_s(run) for run in runs] for name, runs in self.runs.items()},
            "cpu_s": self.cpu_s,
            "idle_cores": self.idle_cores,
        }


def compare(
    systems: Mapping[str, System],
    workload: Workload,
    *,
    vocab_size: int,
    measure: Callable[[Run], float],
    rounds: int,
    progress: Callable[[str], None],
) -> Comparison:
    """Runs all systems in turn. Every round has new prompts of the same lengths, so that no prefix cache has them.

    Args:
        systems: by name.
        workload: of the first round.
        vocab_size: of the model.
        measure: the figure of a run, in seconds; less is better.
        rounds: measured rounds, after one to warm up.
        progress: called with every figure.
    """
    runs: dict[str, list[Run]] = {name: [] for name in systems}
    cpu_times_s: dict[str, list[float]] = {name: [] for name in systems}
    idle = {name: _IdleMeter(system) for name, system in systems.items()}

    def timed(name: str) -> Callable[[], float]:
        turns = itertools.count()

        def run() -> float:
            turn_workload = with_fresh_prompts(workload, next(turns), vocab_size)
            with contextlib.ExitStack() as stack:
                for other, meter in idle.items():
                    if not systems[other].pids & systems[name].pids:
                        stack.enter_context(meter)
                pids = systems[name].pids | {os.getpid()}
                before_s = sum(map(cpu_s, pids))
                outcome = systems[name].generate(turn_workload)
                cpu_times_s[name].append(sum(map(cpu_s, pids)) - before_s)
            check_lengths(name, outcome, turn_workload)
            runs[name].append(outcome)
            return measure(outcome)

        return run

    samples = alternate({name: timed(name) for name in systems}, rounds=rounds, progress=progress)
    counted = {name: tuple(all_runs[-rounds:]) for name, all_runs in runs.items()}
    counted_cpu_s = {name: tuple(times_s[-rounds:]) for name, times_s in cpu_times_s.items()}
    return Comparison(samples, counted, {name: meter.cores for name, meter in idle.items()}, counted_cpu_s)


class _IdleMeter:
    """CPU time of a system's processes inside `with` blocks, in which it has nothing to do."""

    def __init__(self, system: System) -> None:
        self._pids = system.pids
        self._cpu_s = self._wall_s = 0.0

    @property
    def cores(self) -> float:
        """CPU seconds per second."""
        return self._cpu_s / self._wall_s if self._wall_s else 0.0

    def __enter__(self) -> None:
        self._cpu_s -= sum(map(cpu_s, self._pids))
        self._wall_s -= time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._cpu_s += sum(map(cpu_s, self._pids))
        self._wall_s += time.monotonic()


def with_fresh_prompts(workload: Workload, turn: int, vocab_size: int) -> Workload:
    """The same lengths and shared prefixes with other tokens: ids are rotated by `turn` steps; id 0 is left out."""
    step = 7919 * turn  # a prime: the first thousands of turns differ for any vocabulary
    prompts = tuple(tuple((token_id - 1 + step) % (vocab_size - 1) + 1 for token_id in p) for p in workload.prompts)
    return Workload(prompts, workload.max_tokens)


def check_lengths(name: str, run: Run, workload: Workload) -> None:
    """Raises BenchmarkError if an answer does not have the requested length."""
    for index, (ids, limit) in enumerate(zip(run.output_ids, workload.max_tokens, strict=True)):
        if len(ids) != limit:
            raise BenchmarkError(f"{name}: request {index} got {len(ids)} tokens of {limit}")


def require_agreement(name: str, agreement: Agreement, *, is_exact: bool) -> None:
    """Raises BenchmarkError if a system's ids are not those of the reference, or int8 ids are far from them.

    Args:
        name: of the system.
        agreement: of its ids with the reference.
        is_exact: only near-ties may differ; otherwise half of the choices may.
    """
    if is_exact:
        require_same_ids(name, agreement)
    elif agreement.share_same < _MIN_INT8_SHARE:
        raise BenchmarkError(f"{name}: int8 is far off: {agreement}")


def ttfts_s(run: Run) -> list[float]:
    """Seconds to the first token of every request, ascending."""
    return sorted(run.ttft_s(index) for index in range(len(run.output_ids)))


def tpot_s(run: Run) -> float:
    """Mean seconds per token after the first, of all requests; 0 where no answer has two tokens.

    Where every answer arrived in one message, it is the run's time per token instead.
    """
    gaps = [gap for index in range(len(run.output_ids)) for gap in run.gaps_s(index)]
    if gaps and not any(gaps):
        return run.wall_s / sum(map(len, run.output_ids))
    return statistics.fmean(gaps) if gaps else 0.0


def latency_s(run: Run) -> float:
    """Seconds from the first request to the last token, per token of an answer on average.

    Unlike TPOT it does not shrink when a late first token arrives together with others.
    """
    return max(times_s[-1] for times_s in run.token_times_s) / statistics.fmean(map(len, run.output_ids))


def decode_s(run: Run) -> float:
    """Mean seconds per token and request while every request decodes: after all have begun and before one has ended.

    Where there is no such time, as when answers arrive whole, it is the run's time per token of the longest instead.
    """
    begin_s = max(times_s[0] for times_s in run.token_times_s)
    end_s = min(times_s[-1] for times_s in run.token_times_s)
    counts = [sum(begin_s < time_s <= end_s for time_s in times_s) for times_s in run.token_times_s]
    if not all(counts):
        return run.wall_s / max(map(len, run.output_ids))
    return (end_s - begin_s) / statistics.fmean(counts)


@contextlib.contextmanager
def on_cpus(num_cpus: int) -> Iterator[None]:
    """Restricts this thread, and every process it starts inside the block, to the first `num_cpus` usable CPUs."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:num_cpus])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
