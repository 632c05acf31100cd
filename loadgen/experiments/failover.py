"""What do clients see of an engine that is killed?

Claim: nothing but a pause. Every token comes once and is the one of an undisturbed run; with another engine there the
pause is about what computing the prompts and the tokens so far anew takes, with none it is the engine's start.

Goal: R1: with two engines the longest pause at most 2 s. R2: with one, under `chairlift up`, no stream waits more than
2 s longer than until the engine is attached again.

Method: streams with prompts of their own, sampled, a connection each, on real engines with the bundled model: first
undisturbed, then in every round `kill -9` for one engine when every stream has a third of its answer. The pause of a
stream that has moved, as its own account says, is its longest gap between two messages from the kill on. A stream
noticed the kill if that gap, moved or not, is longer than any gap of any stream in the undisturbed run. Engines,
frontend and clients share the machine's cores, also with the start of the engine that comes back.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np

from chairlift.bench.benchmark import Benchmark, BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from loadgen.experiments.killable import Mortal, TwoEngines, UnderUp
from loadgen.experiments.streams import Stream, play

_GOAL_S = 2.0
_NUM_STREAMS, _NUM_TOKENS = 16, 384
_QUICK_STREAMS, _QUICK_TOKENS = 3, 600  # long enough not to be over before anybody kills
_MOST_MISSES = 3  # kills in a row of an engine that had answered everything: clients may lag behind it
_UNNOTICED_S = 0.5  # a loss is noticed within milliseconds; before that all engines seem to be there
_PROMPT_WORDS = ("Once", "upon", "a", "time", "there", "was", "little", "dog", "who", "liked", "to", "play", "ball")


@dataclass(frozen=True, slots=True)
class _Round:
    """One kill.

    Attributes:
        pauses_s: of the streams that moved.
        restart_s: from the kill until all engines were attached again.
        num_noticed: of these, with a gap longer than any undisturbed one.
        num_others: so of the streams that had not moved.
    """

    pauses_s: list[float]
    restart_s: float
    num_noticed: int
    num_others: int


class _Contest:
    """One kind of server, undisturbed and then under fire."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self._settings = settings
        self.num_streams = _QUICK_STREAMS if settings.quick else _NUM_STREAMS
        self._num_tokens = _QUICK_TOKENS if settings.quick else _NUM_TOKENS
        rng = np.random.default_rng(0)
        self._prompts = [" ".join(rng.choice(_PROMPT_WORDS, 24)) for _ in range(self.num_streams)]
        self.undisturbed_gaps_s: list[float] = []
        self.rounds: list[_Round] = []

    def hold(self, server: Mortal) -> None:
        """Runs everything.

        Raises: BenchmarkError: a stream failed or has other tokens than undisturbed, or none ever lost its engine.
        """
        with server:
            self._play(server, _ignore)  # warms up
            reference = self._play(server, _ignore)
            self.undisturbed_gaps_s = list(chain.from_iterable(stream.gaps_s for stream in reference))
            for number in range(self._settings.rounds):
                self.rounds.append(self._kill_someone(server, [stream.token_ids for stream in reference]))
                self._settings.progress(
                    f"{self.name}, round {number + 1}: {len(self.rounds[-1].pauses_s)} of {self.num_streams} moved, "
                    f"{statistics.median(self.rounds[-1].pauses_s):.3f} s"
                )

    def _kill_someone(self, server: Mortal, reference: list[tuple[int, ...]]) -> _Round:
        """A round in which streams lose their engine."""
        for _ in range(_MOST_MISSES):
            played = self._round(server, reference)
            if played.pauses_s:
                return played
            self._settings.progress(f"{self.name}: the engine had answered everything when it was killed; again")
        raise BenchmarkError(f"{self.name}: no stream has lost its engine in {_MOST_MISSES} kills")

    def _round(self, server: Mortal, reference: list[tuple[int, ...]]) -> _Round:
        killed_at_s = 0.0
        with ThreadPoolExecutor(1) as watcher:
            back_at_s: Future[float] | None = None

            def kill(num_tokens: int) -> None:
                nonlocal killed_at_s, back_at_s
                if num_tokens >= self._num_tokens // 3 and back_at_s is None:
                    killed_at_s = server.kill()
                    back_at_s = watcher.submit(_wait_whole, server)

            streams = self._play(server, kill)
            assert back_at_s is not None, "every stream has a third of its answer"
            restart_s = back_at_s.result() - killed_at_s
        different = sum(stream.token_ids != ids for stream, ids in zip(streams, reference, strict=True))
        if different:
            raise BenchmarkError(f"{self.name}: {different} of {len(streams)} answers differ from the undisturbed run")
        moved = [stream for stream in streams if stream.moved_s]
        longest_s = max(self.undisturbed_gaps_s)
        noticed = [stream for stream in streams if _longest_since_s(stream, killed_at_s) > longest_s]
        pauses_s = [_longest_since_s(stream, killed_at_s) for stream in moved]
        num_noticed = sum(pause_s > longest_s for pause_s in pauses_s)
        return _Round(pauses_s, restart_s, num_noticed, len(noticed) - num_noticed)

    def _play(self, server: Mortal, on_progress: Callable[[int], None]) -> list[Stream]:
        return asyncio.run(play(server.target, self._prompts, num_tokens=self._num_tokens, on_progress=on_progress))


def _wait_whole(server: Mortal) -> float:
    """When it is."""
    time.sleep(_UNNOTICED_S)
    server.wait_whole()
    return time.monotonic()


def _ignore(num_tokens: int) -> None:
    """Nothing is to be done at any point."""


def _longest_since_s(stream: Stream, moment_s: float) -> float:
    gaps_s = zip(stream.gaps_s, stream.times_s[1:], strict=True)
    return max((gap_s for gap_s, end_s in gaps_s if end_s > moment_s), default=0.0)


def _run(settings: Settings) -> Outcome:
    flags = ("--threads", str(max(settings.threads // 2, 1)))
    two = _Contest("two engines", settings)
    two.hold(TwoEngines(settings.scratch / "2", flags))
    one = _Contest("one engine", settings)
    one.hold(UnderUp(settings.scratch / "1", flags))
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
        contest.name: {
            "undisturbed_gaps_s": contest.undisturbed_gaps_s,
            "pauses_s": [turn.pauses_s for turn in contest.rounds],
            "restart_s": [turn.restart_s for turn in contest.rounds],
            "num_noticed": [turn.num_noticed for turn in contest.rounds],
            "num_others": [turn.num_others for turn in contest.rounds],
        }
        for contest in (two, one)
    }
    return Outcome(results, raw)


def _usual(contest: _Contest) -> Result:
    p50_s, p99_s, longest_s = np.percentile(contest.undisturbed_gaps_s, [50, 99, 100])
    return Result(
        "",
        f"{contest.name}: gap, undisturbed",
        1e3 * float(p50_s),
        "ms",
        note=f"median; p99 {1e3 * p99_s:.0f}, longest {1e3 * longest_s:.0f} ms",
    )


def _median(benchmark_id: str, contest: _Contest) -> Result:
    pauses_s = sorted(chain.from_iterable(turn.pauses_s for turn in contest.rounds))
    medians = ", ".join(f"{statistics.median(turn.pauses_s):.2f}" for turn in contest.rounds)
    return Result(
        benchmark_id,
        f"{contest.name}: pause of those that moved, median",
        statistics.median(pauses_s),
        "s",
        note=f"{pauses_s[0]:.2f} to {pauses_s[-1]:.2f}; medians of the rounds {medians}",
    )


def _share(contest: _Contest) -> str:
    num_streams = contest.num_streams * len(contest.rounds)
    num_moved = sum(len(turn.pauses_s) for turn in contest.rounds)
    num_noticed = sum(turn.num_noticed for turn in contest.rounds)
    num_others = sum(turn.num_others for turn in contest.rounds)
    return (
        f"{num_moved} of {num_streams} streams moved; {num_noticed} of these and {num_others} of the others had a gap "
        "longer than any undisturbed one"
    )


BENCHMARK = Benchmark(
    "failover", ("R1", "R2"), "the pause that kill -9 of an engine costs, and every token", _run, has_cpu_floors=False
)
