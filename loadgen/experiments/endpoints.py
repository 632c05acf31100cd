"""Endpoints: cost of a token through gRPC and HTTP, with and without workers, uvloop and coalescing.

Claim: a token costs the same through either endpoint. Tokens that accumulate are sent together, so a frontend cannot
fall behind permanently. Workers help where one core is not enough.

Method: frontends with different flags share one engine without a model, which has the real scheduler, step loop and
server. One frontend at a time is driven by 64 streams, each on a connection of its own. First at a pace that all can
keep (CPU per token, first token), then with an engine that runs as fast as it can (tokens per second). The first token
is counted from the request, and for gRPC includes opening the connection.

Figures are medians over the rounds; a ratio is the median of the ratios within each round. CPU is that of all processes
of the frontend. Engine, frontend and client share the machine's cores: with two cores, two workers have no core of
their own, and tokens per second show the cost of the whole, not what a frontend could do alone.
"""

import argparse
import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from loadgen.experiments.client import Stream, ask_grpc, ask_http, delivered
from loadgen.processes import cpu_s, held_port, start_module, wait_until

_ASK: Mapping[str, Callable[[int, int], Awaitable[Stream]]] = {"gRPC": ask_grpc, "HTTP": ask_http}
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
_START_TIMEOUT_S = 60.0
_NUM_PROBES = 16  # each on a connection of its own, so that all workers answer
_ALL_LISTEN = "workers listen on"


class _Frontend:
    """A frontend with both endpoints for the length of a `with` block, attached to a running engine.

    Attributes:
        ports: by endpoint.
    """

    def __init__(self, engine_socket: Path, flags: Sequence[str], log: Path) -> None:
        self._engine_socket = engine_socket
        self._flags = flags
        self._log = log
        self._has_workers = "--workers" in flags

    def __enter__(self) -> Self:
        self._held_ports = ExitStack()
        self.ports = {endpoint: self._held_ports.enter_context(held_port()) for endpoint in _ASK}
        ports = ("--port", str(self.ports["gRPC"]), "--http-port", str(self.ports["HTTP"]))
        flags = ["--engine", f"unix:{self._engine_socket}", *ports, *self._flags]
        self._process = start_module("frontend", flags, self._log)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()
        self._held_ports.close()

    def wait_until_served(self, runner: asyncio.Runner) -> None:
        """Waits until every worker takes requests; raises TargetError if that fails."""
        wait_until(lambda: self._listens() and runner.run(self._is_served()), [self._process], _START_TIMEOUT_S)

    def cpu_s(self) -> float:
        """CPU seconds of all its processes."""
        return self._process.cpu_s() + sum(map(cpu_s, self._process.children()))

    def _listens(self) -> bool:
        """Whether all workers listen; connections go to those that do, so that an answer does not show it."""
        return not self._has_workers or _ALL_LISTEN in self._log.read_text()

    async def _is_served(self) -> bool:
        try:
            await asyncio.gather(*(ask_grpc(self.ports["gRPC"], 1) for _ in range(_NUM_PROBES)))
        except BenchmarkError:
            return False
        return True


class _Turn(NamedTuple):
    """Figures of one frontend in one round."""

    tokens_per_s: float
    frontend_us: float
    engine_us: float
    client_us: float
    tokens_per_message: float
    ttft_p50_ms: float
    ttft_p99_ms: float


class _Comparison:
    """All frontends in front of one engine, at one pace.

    Attributes:
        turns: per endpoint and flags, one per round.
    """

    def __init__(self, settings: Settings, pace: str) -> None:
        self._settings = settings
        self._pace = pace
        self._num_streams = 4 if settings.quick else _NUM_STREAMS
        self._output_len = 16 if settings.quick else _OUTPUT_LEN[pace]
        self._folder = settings.scratch / pace.replace(" ", "-")
        self.turns: dict[str, list[_Turn]] = {}

    def run(self) -> None:
        """Runs all rounds."""
        self._folder.mkdir()
        socket = self._folder / "engine.sock"
        with ExitStack() as stack:
            runner = stack.enter_context(asyncio.Runner())
            flags = ("--uds", str(socket), "--exit-on-stdin-close", "--period-us", str(_PERIOD_US[self._pace]))
            self._engine = start_module("engine.bench.null_engine", flags, self._folder / "engine.log")
            stack.callback(self._engine.stop)
            frontends = {
                name: stack.enter_context(_Frontend(socket, flags, self._folder / f"frontend-{index}.log"))
                for index, (name, flags) in enumerate(_FLAGS.items())
                if name in (_BASE, *(self._settings.options.only or _FLAGS))
            }
            for name, frontend in frontends.items():
                self._settings.progress(f"starting {name}")
                frontend.wait_until_served(runner)
            systems: dict[str, Callable[[], float]] = {
                f"{endpoint}, {name}": partial(self._turn, runner, f"{endpoint}, {name}", endpoint, frontend)
                for endpoint in _ASK
                for name, frontend in frontends.items()
            }
            alternate(systems, rounds=self._settings.rounds, progress=self._settings.progress)
        self.turns = {name: turns[-self._settings.rounds :] for name, turns in self.turns.items()}  # no warm-up

    def median(self, name: str, figure: str) -> float:
        """Median of one figure over the rounds."""
        return float(statistics.median(getattr(turn, figure) for turn in self.turns[name]))

    def ratio(self, name: str, base: str, figure: str) -> str:
        """Ratio of a figure to that of the base: median round, and range."""
        pairs = zip(self.turns[name], self.turns[base], strict=True)
        ratios = [getattr(turn, figure) / getattr(other, figure) for turn, other in pairs]
        return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f}..{max(ratios):.2f})"

    def _turn(self, runner: asyncio.Runner, name: str, endpoint: str, frontend: _Frontend) -> float:
        asks = [partial(_ASK[endpoint], frontend.ports[endpoint], self._output_len) for _ in range(self._num_streams)]
        clocks = {"frontend": frontend.cpu_s, "engine": self._engine.cpu_s, "client": lambda: cpu_s(os.getpid())}
        num_tokens = self._num_streams * self._output_len
        streams, cost = delivered(name, lambda: runner.run(_all(asks)), num_tokens, clocks)
        p50_s, p99_s = np.percentile([stream.ttft_s for stream in streams], [50, 99])
        turn = _Turn(
            tokens_per_s=cost.tokens_per_s,
            frontend_us=cost.cpu_us["frontend"],
            engine_us=cost.cpu_us["engine"],
            client_us=cost.cpu_us["client"],
            tokens_per_message=cost.tokens_per_message,
            ttft_p50_ms=1e3 * float(p50_s),
            ttft_p99_ms=1e3 * float(p99_s),
        )
        self.turns.setdefault(name, []).append(turn)
        return turn.frontend_us / 1e6


async def _all(asks: Iterable[Callable[[], Awaitable[Stream]]]) -> list[Stream]:
    return await asyncio.gather(*(ask() for ask in asks))


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    comparisons = {pace: _Comparison(settings, pace) for pace in settings.options.pace or _PERIOD_US}
    for pace, comparison in comparisons.items():
        settings.progress(pace)
        comparison.run()
    results = [_result(pace, comparison, name) for pace, comparison in comparisons.items() for name in comparison.turns]
    raw = {
        pace: {name: [turn._asdict() for turn in turns] for name, turns in comparison.turns.items()}
        for pace, comparison in comparisons.items()
    }
    return Outcome(tuple(results), raw=raw)


def _result(pace: str, comparison: _Comparison, name: str) -> Result:
    base = f"{name.partition(',')[0]}, {_BASE}"
    what, unit = ("frontend_us", "us/token") if pace == _PACED else ("tokens_per_s", "tok/s")
    cpu = ", ".join(
        f"{process} {comparison.median(name, f'{process}_us'):.1f}" for process in ("frontend", "engine", "client")
    )
    return Result(
        "",
        f"{name}: {pace}",
        comparison.median(name, what),
        unit,
        note=f"{comparison.ratio(name, base, what)}; CPU us per token: {cpu}; first token p50 "
        f"{comparison.median(name, 'ttft_p50_ms'):.1f}, p99 {comparison.median(name, 'ttft_p99_ms'):.1f} ms; "
        f"{comparison.median(name, 'tokens_per_message'):.2f} tokens per message",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--only",
        action="append",
        choices=_FLAGS,
        help="compare only these with one worker; may be repeated (default: all)",
    )
    parser.add_argument("--pace", action="append", choices=_PERIOD_US, help="may be repeated; default: both")
