"""Failover: what clients see when an engine is killed.

Claim: only a pause. Every token arrives once and equals that of an undisturbed run. With a second engine the pause is
about the time to compute the prompts and the tokens so far again; with one engine it is the engine's restart.

Goal: R1: with two engines the longest pause is at most 2 s. R2: with one, under `chairlift up`, no stream waits more
than 2 s longer than until the engine is attached again.

Method: sampled streams with different prompts, one connection each, on real engines with the bundled model. First an
undisturbed run; then in every round `kill -9` for one engine once every stream has a third of its answer. The pause of
a stream that moved (its own timing says so) is its longest interval between two messages after the kill. A stream
noticed the kill if that interval is longer than any interval of any stream in the undisturbed run. Engines, frontend
and clients share the machine's cores, also while the killed engine restarts.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import grpc.aio
import numpy as np

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from loadgen.experiments.client import OPTIONS, Stream, stream_grpc
from loadgen.experiments.killable import KillableServer, TwoEngines, UnderUp

_GOAL_S = 2.0
_NUM_STREAMS, _NUM_TOKENS = 16, 384
_QUICK_STREAMS, _QUICK_TOKENS = 3, 600  # long enough to be unfinished at the kill
_MAX_MISSES = 3  # consecutive kills of an engine that had answered everything: clients may lag behind it
_UNNOTICED_S = 0.5  # a loss is noticed within milliseconds; before that all engines appear attached
_PROMPT_WORDS = ("Once", "upon", "a", "time", "there", "was", "little", "dog", "who", "liked", "to", "play", "ball")


@dataclass(frozen=True, slots=True)
class _Round:
    """One kill.

    Attributes:
        pauses_s: of the streams that moved.
        restart_s: from the kill until all engines were attached again.
        num_noticed: streams that moved with an interval longer than any undisturbed one.
        num_others: the same count among streams that did not move.
    """

    pauses_s: list[float]
    restart_s: float
    num_noticed: int
    num_others: int


class _Scenario:
    """One kind of server: an undisturbed run, then rounds with a kill."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self._settings = settings
        self.num_streams = _QUICK_STREAMS if settings.quick else _NUM_STREAMS
        self._num_tokens = _QUICK_TOKENS if settings.quick else _NUM_TOKENS
        rng = np.random.default_rng(0)
        self._prompts = [" ".join(rng.choice(_PROMPT_WORDS, 24)) for _ in range(self.num_streams)]
        self.undisturbed_s: list[float] = []
        self.rounds: list[_Round] = []

    def run(self, server: KillableServer) -> None:
        """Runs everything.

        Raises: BenchmarkError: a stream failed or has other tokens than undisturbed, or none ever lost its engine.
        """
        with server:
            self._stream(server, _ignore)  # warms up
            reference = self._stream(server, _ignore)
            self.undisturbed_s = list(chain.from_iterable(stream.intervals_s for stream in reference))
            for number in range(self._settings.rounds):
                self.rounds.append(self._round_with_losses(server, [stream.token_ids for stream in reference]))
                self._settings.progress(
                    f"{self.name}, round {number + 1}: {len(self.rounds[-1].pauses_s)} of {self.num_streams} moved, "
                    f"{statistics.median(self.rounds[-1].pauses_s):.3f} s"
                )

    def _round_with_losses(self, server: KillableServer, reference: list[tuple[int, ...]]) -> _Round:
        """A round in which streams lose their engine."""
        for _ in range(_MAX_MISSES):
            result = self._round(server, reference)
            if result.pauses_s:
                return result
            self._settings.progress(f"{self.name}: the engine had answered everything when it was killed; again")
        raise BenchmarkError(f"{self.name}: no stream has lost its engine in {_MAX_MISSES} kills")

    def _round(self, server: KillableServer, reference: list[tuple[int, ...]]) -> _Round:
        killed_at_s = 0.0
        with ThreadPoolExecutor(1) as watcher:
            back_at_s: Future[float] | None = None

            def kill(num_tokens: int) -> None:
                nonlocal killed_at_s, back_at_s
                if num_tokens >= self._num_tokens // 3 and back_at_s is None:
                    killed_at_s = server.kill()
                    back_at_s = watcher.submit(_wait_complete, server)

            streams = self._stream(server, kill)
            assert back_at_s is not None, "every stream has a third of its answer"
            restart_s = back_at_s.result() - killed_at_s
        different = sum(stream.token_ids != ids for stream, ids in zip(streams, reference, strict=True))
        if different:
            raise BenchmarkError(f"{self.name}: {different} of {len(streams)} answers differ from the undisturbed run")
        moved = [stream for stream in streams if stream.moved_s]
        longest_s = max(self.undisturbed_s)
        noticed = [stream for stream in streams if _longest_since_s(stream, killed_at_s) > longest_s]
        pauses_s = [_longest_since_s(stream, killed_at_s) for stream in moved]
        num_noticed = sum(pause_s > longest_s for pause_s in pauses_s)
        return _Round(pauses_s, restart_s, num_noticed, len(noticed) - num_noticed)

    def _stream(self, server: KillableServer, on_progress: Callable[[int], None]) -> list[Stream]:
        return asyncio.run(_stream_all(server.target, self._prompts, self._num_tokens, on_progress))


def _wait_complete(server: KillableServer) -> float:
    """Returns the time at which all engines are attached again."""
    time.sleep(_UNNOTICED_S)
    server.wait_complete()
    return time.monotonic()


def _ignore(num_tokens: int) -> None:
    """Takes no action."""


def _longest_since_s(stream: Stream, moment_s: float) -> float:
    intervals = zip(stream.intervals_s, stream.times_s[1:], strict=True)
    return max((interval_s for interval_s, end_s in intervals if end_s > moment_s), default=0.0)


async def _stream_all(
    target: str, prompts: list[str], num_tokens: int, on_progress: Callable[[int], None]
) -> list[Stream]:
    """Streams all prompts at once, over one connection each; the index of a stream is its seed.

    Args:
        target: gRPC endpoint of the frontend.
        prompts: one per stream.
        num_tokens: length of each answer.
        on_progress: called with the smallest number of tokens of any stream, whenever it grows.
    """
    counts = [0] * len(prompts)

    async def stream(index: int) -> Stream:
        def count(num_new: int) -> None:
            before = min(counts)
            counts[index] += num_new
            if (least := min(counts)) > before:
                on_progress(least)

        spec = pb.GenerationSpec(
            text=prompts[index],
            sampling=pb.SamplingOptions(temperature=1.0, seed=index),
            stop=pb.StopOptions(max_tokens=num_tokens, ignore_end_token=True),
            output=pb.OutputOptions(token_ids=True),
        )
        async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
            return await stream_grpc(GenerationServiceStub(channel), spec, count)

    return await asyncio.gather(*(stream(index) for index in range(len(prompts))))


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    flags = ("--threads", str(max(settings.threads // 2, 1)))
    two = _Scenario("two engines", settings)
    two.run(TwoEngines(settings.scratch / "2", flags))
    one = _Scenario("one engine", settings)
    one.run(UnderUp(settings.scratch / "1", flags))
    longest_s = max(max(turn.pauses_s) for turn in two.rounds)
    over_s = max(max(turn.pauses_s) - turn.restart_s for turn in one.rounds)
    results = (
        _usual(two),
        _median("R1", two),
        Result("R1", "two engines: longest pause", longest_s, "s", goal=_GOAL_S, direction="at most", note=_share(two)),
        _usual(one),
        _median("R2", one),
        Result(
            "R2",
            "one engine: longest pause, less its restart",
            over_s,
            "s",
            goal=_GOAL_S,
            direction="at most",
            note=f"restarts {', '.join(f'{turn.restart_s:.1f}' for turn in one.rounds)} s; {_share(one)}",
        ),
    )
    raw = {
        scenario.name: {
            "undisturbed_gaps_s": scenario.undisturbed_s,
            "pauses_s": [turn.pauses_s for turn in scenario.rounds],
            "restart_s": [turn.restart_s for turn in scenario.rounds],
            "num_noticed": [turn.num_noticed for turn in scenario.rounds],
            "num_others": [turn.num_others for turn in scenario.rounds],
        }
        for scenario in (two, one)
    }
    return Outcome(results, raw)


def _usual(scenario: _Scenario) -> Result:
    p50_s, p99_s, longest_s = np.percentile(scenario.undisturbed_s, [50, 99, 100])
    return Result(
        "",
        f"{scenario.name}: interval, undisturbed",
        1e3 * float(p50_s),
        "ms",
        note=f"median; p99 {1e3 * p99_s:.0f}, longest {1e3 * longest_s:.0f} ms",
    )


def _median(benchmark_id: str, scenario: _Scenario) -> Result:
    pauses_s = sorted(chain.from_iterable(turn.pauses_s for turn in scenario.rounds))
    medians = ", ".join(f"{statistics.median(turn.pauses_s):.2f}" for turn in scenario.rounds)
    return Result(
        benchmark_id,
        f"{scenario.name}: pause of those that moved, median",
        statistics.median(pauses_s),
        "s",
        note=f"{pauses_s[0]:.2f} to {pauses_s[-1]:.2f}; medians of the rounds {medians}",
    )


def _share(scenario: _Scenario) -> str:
    num_streams = scenario.num_streams * len(scenario.rounds)
    num_moved = sum(len(turn.pauses_s) for turn in scenario.rounds)
    num_noticed = sum(turn.num_noticed for turn in scenario.rounds)
    num_others = sum(turn.num_others for turn in scenario.rounds)
    return (
        f"{num_moved} of {num_streams} streams moved; {num_noticed} of these and {num_others} of the others had an "
        "interval longer than any undisturbed one"
    )
