"""Chairlift's frontend and SMG before the same engine.

Question: what does a frontend in Python cost per token and per request, compared with one in Rust?

Method: an engine without a model (the real scheduler, step loop and server at a steady pace) serves Chairlift's stream
and vLLM's API. Each gateway streams completions over HTTP from it, in turn with the other, with 1, 64 and 1,000 streams
at once. CPU is that of the gateway's process, and beside it what its messages cost the engine. Runs with answers of two
lengths separate tokens from requests: per token it is the difference of the two, per request what is left of the
shorter one. Times to the first token stand beside those of the engine asked directly, over vLLM's API, in the same
round: the difference is what a gateway adds. With 1,000 streams the direct client, which is in Python, is the limit.

Client, gateway and engine share the machine's cores, so times with many streams contain their queues. CPU does not.

SMG is the program `smg`, or what CHAIRLIFT_SMG names.
"""

import argparse
import asyncio
import os
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from loadgen.errors import TargetError
from loadgen.experiments.gateways.streams import HttpClient, Load, run_load
from loadgen.processes import Process, held_port, start_module, wait_until

FRONTEND, SMG, DIRECT = "frontend", "smg", "direct"
_MODEL = "null-engine"
_PROMPT_LEN = 64
_START_TIMEOUT_S = 120.0


class Case(NamedTuple):
    """A number of streams: the engine's pace, and the loads with short and long answers."""

    period_us: int
    short: Load
    long: Load


_CASES = {
    1: Case(5_000, Load(1, 40, 2, 0.0), Load(1, 10, 64, 0.0)),
    64: Case(20_000, Load(64, 2, 2, 0.5), Load(64, 1, 64, 0.5)),
    1000: Case(100_000, Load(1000, 1, 2, 1.0), Load(1000, 1, 32, 1.0)),
}
_QUICK = {4: Case(2_000, Load(4, 2, 2, 0.0), Load(4, 1, 8, 0.0))}


class _Cost(NamedTuple):
    """One round: CPU microseconds of a token and of a request in the gateway, and of a token in the engine, and
    milliseconds to the first token of each request.
    """

    us_per_token: float
    us_per_request: float
    engine_us_per_token: float
    ttft_ms: tuple[float, ...]


class _Fleet(NamedTuple):
    """An engine and the gateways before it."""

    engine: Process
    engine_port: int
    http_ports: dict[str, int]
    gateways: dict[str, Process]


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    smg = os.environ.get("CHAIRLIFT_SMG") or shutil.which("smg")
    if smg is None and not settings.options.without_smg:
        raise TargetError("the program smg is not installed: pip install smg, or name it by CHAIRLIFT_SMG")
    program = None if settings.options.without_smg else smg
    costs: dict[str, list[_Cost]] = {}
    with ExitStack() as stack:
        systems: dict[str, Callable[[], float]] = {}
        for num_streams, case in (_QUICK if settings.quick else _CASES).items():
            settings.progress(f"starting an engine and gateways for {num_streams} streams")
            folder = settings.scratch / str(num_streams)
            fleet = stack.enter_context(_fleet(folder, case, num_streams, program))
            for name in (DIRECT, *fleet.gateways):
                kept = costs[f"{name}, {num_streams}"] = []
                systems[f"{name}, {num_streams}"] = _measure(fleet, name, case, kept)
        samples = alternate(systems, rounds=settings.rounds, progress=settings.progress)
    kept_costs = {name: values[-settings.rounds :] for name, values in costs.items()}  # without the warm-up
    results = [result for name, values in kept_costs.items() for result in _results(name, values)]
    raw = {name: [cost._asdict() for cost in values] for name, values in kept_costs.items()}
    return Outcome(tuple(results), raw={"rounds": samples.raw, "costs": raw})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--without-smg", action="store_true", help="measure Chairlift's frontend alone")


def _measure(fleet: _Fleet, name: str, case: Case, kept: list[_Cost]) -> Callable[[], float]:
    def measure() -> float:
        cost = asyncio.run(_cost(fleet, name, case, seed=len(kept)))
        kept.append(cost)
        return cost.us_per_token

    return measure


async def _cost(fleet: _Fleet, name: str, case: Case, seed: int) -> _Cost:
    if name == DIRECT:
        from loadgen.experiments.gateways.direct import DirectClient

        async with DirectClient(fleet.engine_port) as direct:
            times = await run_load(case.short, direct.stream, _PROMPT_LEN, seed)
        return _Cost(0.0, 0.0, 0.0, _milliseconds(times))
    processes = (fleet.gateways[name], fleet.engine)

    def clocks() -> tuple[float, ...]:
        return tuple(process.cpu_s() for process in processes)

    async with HttpClient(fleet.http_ports[name], _MODEL) as client:
        began = clocks()
        times = await run_load(case.short, client.stream, _PROMPT_LEN, seed)
        between = clocks()
        await run_load(case.long, client.stream, _PROMPT_LEN, seed + 1000)
        ended = clocks()
    (token_s, request_s), (engine_token_s, _) = map(partial(_per_token_and_request, case), began, between, ended)
    return _Cost(1e6 * token_s, 1e6 * request_s, 1e6 * engine_token_s, _milliseconds(times))


def _per_token_and_request(case: Case, began_s: float, between_s: float, ended_s: float) -> tuple[float, float]:
    """Returns the CPU seconds of a token and of a request without its tokens."""
    short_s, long_s = (between_s - began_s) / case.short.num_requests, (ended_s - between_s) / case.long.num_requests
    token_s = (long_s - short_s) / (case.long.max_tokens - case.short.max_tokens)
    return token_s, short_s - case.short.max_tokens * token_s


def _milliseconds(times_s: list[float]) -> tuple[float, ...]:
    return tuple(1e3 * time_s for time_s in times_s)


def _results(name: str, rounds: list[_Cost]) -> Iterator[Result]:
    costs = {
        "CPU per token": [cost.us_per_token for cost in rounds],
        "CPU per token in the engine": [cost.engine_us_per_token for cost in rounds],
        "CPU per request": [cost.us_per_request for cost in rounds],
    }
    times = {"median time to the first token": [statistics.median(cost.ttft_ms) for cost in rounds]}
    for unit, figures in (("us", {} if name.startswith(DIRECT) else costs), ("ms", times)):
        for what, values in figures.items():
            spread = f"rounds {min(values):.4g}..{max(values):.4g}"
            figure = statistics.median(values)
            yield Result("", f"{name} streams: {what}", figure, unit, direction="at most", note=spread)


@contextmanager
def _fleet(folder: Path, case: Case, num_streams: int, smg: str | None) -> Iterator[_Fleet]:
    """Starts an engine, Chairlift's frontend and SMG before it.

    Raises: TargetError: one of them does not start.
    """
    folder.mkdir()
    with ExitStack() as stack:
        engine_port, grpc_port, http_port, smg_port, metrics_port = (stack.enter_context(held_port()) for _ in range(5))

        def kept(process: Process) -> Process:
            stack.callback(process.stop)
            return process

        flags = ["--port", str(engine_port), "--vllm-api", "--max-num-seqs", str(num_streams)]
        flags += ["--period-us", str(case.period_us), "--max-model-len", "1024", "--exit-on-stdin-close"]
        engine = kept(start_module("engine.bench.null_engine", flags, folder / "engine.log"))
        flags = ["--engine", f"127.0.0.1:{engine_port}", "--port", str(grpc_port), "--http-port", str(http_port)]
        flags += ["--max-queued-requests", "8192"]
        gateways = {FRONTEND: kept(start_module("frontend", flags, folder / "frontend.log"))}
        ports = {FRONTEND: http_port}
        wait_until(lambda: _answers(http_port), [engine, gateways[FRONTEND]], _START_TIMEOUT_S)
        if smg is not None:
            command = [smg, "launch", "--host", "127.0.0.1", "--port", str(smg_port), "--log-level", "warn"]
            command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
            command += ["--policy", "round_robin", "--worker-urls", f"grpc://127.0.0.1:{engine_port}"]
            gateways[SMG] = kept(Process(command, folder / "smg.log", name="smg"))
            ports[SMG] = smg_port
            wait_until(lambda: _answers(smg_port), [engine, gateways[SMG]], _START_TIMEOUT_S)
        yield _Fleet(engine, engine_port, ports, gateways)


def _answers(port: int) -> bool:
    """Whether a gateway answers a request."""

    async def ask() -> bool:
        try:
            async with HttpClient(port, _MODEL) as client:
                return (await client.stream("a" * _PROMPT_LEN, 2)).num_tokens == 2
        except (TimeoutError, TargetError, OSError):
            return False

    return asyncio.run(ask())
