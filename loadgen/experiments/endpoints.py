"""What does a token cost through each door, and what do workers, uvloop and coalescing change?

Claim: a token costs the same through either door; tokens that pile up travel together, so that a frontend never falls
behind for good; workers take over where one core is not enough.

Method: frontends with different flags, all attached to one engine without a model, the real scheduler, step loop and
server; one of them is driven at a time, in turn, by 64 streams, each on a connection of its own. Twice: at a pace that
all can keep (CPU per token, first token), and with an engine that runs as fast as it can (tokens per second). The first
token is counted from the request, and for gRPC includes opening the connection.

Figures are medians over the rounds; a ratio is that of the two within each round, the median again. CPU is that of all
processes of the frontend. Engine, frontend and client share the machine's cores: with two of them, two workers have no
core of their own, and tokens per second say what the whole costs, not what a frontend could do.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Benchmark, BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from loadgen.experiments.endpoint_clients import ASK, Answer
from loadgen.experiments.frontend_process import Doors
from loadgen.experiments.processes import Process, cpu_s

_BASE = "1 worker"
_FLAGS: Mapping[str, tuple[str, ...]] = {
    _BASE: ("--no-uvloop",),
    "1 worker, uvloop": ("--uvloop",),
    "1 worker, no coalescing": ("--no-uvloop", "--no-coalesce"),
    "2 workers": ("--no-uvloop", "--workers", "2"),
    "2 workers, uvloop": ("--uvloop", "--workers", "2"),
}
_NUM_STREAMS = 64
_PACED, _FLAT_OUT = "paced", "flat out"
_PERIOD_US = {_PACED: 12_800, _FLAT_OUT: 0}  # paced: 5,000 tokens/s
_OUTPUT_LEN = {_PACED: 200, _FLAT_OUT: 1600}


class _Run(NamedTuple):
    """One contestant's turn."""

    tokens_per_s: float
    frontend_us: float
    engine_us: float
    client_us: float
    tokens_per_message: float
    ttft_p50_ms: float
    ttft_p99_ms: float


class _Contest:
    """All frontends in front of one engine, at one pace."""

    def __init__(self, settings: Settings, pace: str) -> None:
        self._settings = settings
        self._pace = pace
        self._num_streams = 4 if settings.quick else _NUM_STREAMS
        self._output_len = 16 if settings.quick else _OUTPUT_LEN[pace]
        self._folder = settings.scratch / pace.replace(" ", "-")
        self.runs: dict[str, list[_Run]] = {}

    def hold(self) -> None:
        """Runs all rounds."""
        self._folder.mkdir()
        socket = self._folder / "engine.sock"
        with ExitStack() as stack:
            runner = stack.enter_context(asyncio.Runner())
            flags = ("--uds", str(socket), "--exit-on-stdin-close", "--period-us", str(_PERIOD_US[self._pace]))
            self._engine = Process("engine.bench.null_engine", flags, self._folder / "engine.log")
            stack.callback(self._engine.stop)
            frontends = {
                name: stack.enter_context(Doors(socket, flags, self._log(index)))
                for index, (name, flags) in enumerate(_FLAGS.items())
                if name in (_BASE, *(self._settings.options.only or _FLAGS))
            }
            for name, doors in frontends.items():
                self._settings.progress(f"starting {name}")
                runner.run(doors.wait_served())
            contestants: dict[str, Callable[[], float]] = {
                f"{door}, {name}": partial(self._turn, runner, f"{door}, {name}", door, doors)
                for door in ASK
                for name, doors in frontends.items()
            }
            alternate(contestants, rounds=self._settings.rounds, progress=self._settings.progress)
        self.runs = {name: runs[-self._settings.rounds :] for name, runs in self.runs.items()}  # without the warm-up

    def median(self, name: str, figure: str) -> float:
        """The middle one of a contestant's figures."""
        return float(statistics.median(getattr(run, figure) for run in self.runs[name]))

    def ratio(self, name: str, base: str, figure: str) -> str:
        """How many times the base's figure a contestant's is: the middle round, and all of them."""
        pairs = zip(self.runs[name], self.runs[base], strict=True)
        ratios = [getattr(run, figure) / getattr(other, figure) for run, other in pairs]
        return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}..{max(ratios):.2f})"

    def _log(self, index: int) -> Path:
        return self._folder / f"frontend-{index}.log"

    def _turn(self, runner: asyncio.Runner, name: str, door: str, doors: Doors) -> float:
        before = self._cpu_s(doors)
        started_s = time.monotonic()
        asks = [partial(ASK[door], doors.ports[door], self._output_len) for _ in range(self._num_streams)]
        answers = runner.run(_all(asks))
        wall_s = time.monotonic() - started_s
        num_tokens = sum(answer.num_tokens for answer in answers)
        if num_tokens != self._num_streams * self._output_len:
            raise BenchmarkError(f"{name}: {num_tokens} tokens of {self._num_streams * self._output_len} came")
        frontend_s, engine_s, client_s = (
            after - start for after, start in zip(self._cpu_s(doors), before, strict=True)
        )
        p50_s, p99_s = np.percentile([answer.first_token_s for answer in answers], [50, 99])
        run = _Run(
            tokens_per_s=num_tokens / wall_s,
            frontend_us=1e6 * frontend_s / num_tokens,
            engine_us=1e6 * engine_s / num_tokens,
            client_us=1e6 * client_s / num_tokens,
            tokens_per_message=num_tokens / sum(answer.num_messages for answer in answers),
            ttft_p50_ms=1e3 * float(p50_s),
            ttft_p99_ms=1e3 * float(p99_s),
        )
        self.runs.setdefault(name, []).append(run)
        return run.frontend_us / 1e6

    def _cpu_s(self, doors: Doors) -> tuple[float, float, float]:
        return doors.cpu_s(), self._engine.cpu_s(), cpu_s(os.getpid())


async def _all(asks: Iterable[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
    return await asyncio.gather(*(ask() for ask in asks))


def _run(settings: Settings) -> Outcome:
    contests = {pace: _Contest(settings, pace) for pace in settings.options.pace or _PERIOD_US}
    for pace, contest in contests.items():
        settings.progress(pace)
        contest.hold()
    results = [_result(pace, contest, name) for pace, contest in contests.items() for name in contest.runs]
    raw = {
        pace: {name: [run._asdict() for run in runs] for name, runs in contest.runs.items()}
        for pace, contest in contests.items()
    }
    return Outcome(tuple(results), raw=raw)


def _result(pace: str, contest: _Contest, name: str) -> Result:
    base = f"{name.partition(',')[0]}, {_BASE}"
    what, unit = ("frontend_us", "us/token") if pace == _PACED else ("tokens_per_s", "tok/s")
    cpu = ", ".join(f"{who} {contest.median(name, f'{who}_us'):.1f}" for who in ("frontend", "engine", "client"))
    return Result(
        "",
        f"{name}: {pace}",
        contest.median(name, what),
        unit,
        note=f"{contest.ratio(name, base, what)}; CPU us per token: {cpu}; first token p50 "
        f"{contest.median(name, 'ttft_p50_ms'):.1f}, p99 {contest.median(name, 'ttft_p99_ms'):.1f} ms; "
        f"{contest.median(name, 'tokens_per_message'):.2f} tokens per message",
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=_FLAGS, help="besides one worker; may be repeated")
    parser.add_argument("--pace", action="append", choices=_PERIOD_US, help="may be repeated; default: both")


BENCHMARK = Benchmark(
    name="doors",
    ids=(),
    summary="tokens through gRPC and HTTP: workers, uvloop, coalescing",
    run=_run,
    add_arguments=_add_arguments,
    has_cpu_floors=False,
)
