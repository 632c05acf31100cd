"""The governor on a real pair: gaps of streams beside long prompts, against a fixed token budget.

Claim: under the policy `slo` a step lasts no longer than the gaps of its streams allow, whatever prompts wait.

Goal: beside ten prompts of 2,048 tokens per second, the 99th percentile of the gaps of 16 streams is at most 1.1 times
their target, which is twice their solo gap, where a fixed token budget misses it by 3 times or more.

Method: a pair with a small model with random weights. First the streams alone, for the solo gap: the mean of all gaps
between tokens, up to the contexts of the next phases; a busy client takes messages in bursts, so that their median says
little. Tokens that came in one message share its gap. Then, on the same pair, the streams with that target and the
prompts, which have none, at a steady rate; gaps count from the first prompt on while prompts come. The same streams and
prompts, with the target of the first pair, run under `fcfs` with a fixed budget of 2,048 and of 512 tokens. On a CPU
the prompts are more work than the engine can do, so that one waits at all times.
"""

import argparse
import asyncio
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import grpc.aio
import numpy as np
from google.protobuf.duration import from_nanoseconds

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from loadgen.experiments.client import OPTIONS, greedy_spec
from loadgen.experiments.latency.served import EngineLimits, percentile, served

_GOAL_GOVERNED, _GOAL_FIXED = 1.1, 3.0
_NUM_STREAMS, _PROMPTS_PER_S = 16, 10.0
_TARGET_FACTOR = 2.0
_STREAM_PROMPT_TOKENS = 64


class _Sizes(NamedTuple):
    shape: str
    prompt_tokens: int
    seconds: float
    vocab_size: int


class _Phase(NamedTuple):
    """Gaps in seconds between the tokens of all streams, and how many prompts were sent and have answered."""

    gaps_s: list[float]
    num_prompts: int
    num_answered: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the experiment's flags."""
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="length of each phase (default: 15)")
    parser.add_argument("--prompts-per-s", type=float, default=_PROMPTS_PER_S, metavar="X", help="(default: 10)")


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    options = settings.options
    sizes = _Sizes("tiny", 256, 1.0, 512) if settings.quick else _Sizes("15M", 2048, options.seconds, 32_000)
    phases: dict[str, _Phase] = {}
    target_s = 0.0
    for name, policy, budget in (("slo", "slo", 2048), ("fixed 2048", "fcfs", 2048), ("fixed 512", "fcfs", 512)):
        limits = EngineLimits(
            shape=sizes.shape,
            max_num_seqs=32,
            max_num_batched_tokens=budget,
            max_model_len=4096,
            threads=max(1, settings.threads - 1),
        )
        with served(limits, settings.scratch / name.replace(" ", "-"), policy=policy) as pair:
            if not target_s:
                solo = asyncio.run(_phase(pair.address, sizes, None, 0.0, sizes.seconds / _TARGET_FACTOR))
                target_s = _TARGET_FACTOR * fmean(solo.gaps_s)
                phases["solo"] = solo
            phase = asyncio.run(_phase(pair.address, sizes, target_s, options.prompts_per_s, sizes.seconds))
        phases[name] = phase
        settings.progress(f"{name}: {_note(phase, target_s)}")
    return _outcome(phases, target_s)


async def _phase(address: str, sizes: _Sizes, target_s: float | None, prompts_per_s: float, seconds: float) -> _Phase:
    """Runs streams, and prompts beside them, and cancels what is left.

    Args:
        address: of the frontend.
        sizes: of the prompts.
        target_s: inter-token target of the streams; None: none.
        prompts_per_s: 0: streams only.
        seconds: from when all streams have begun.
    """
    rng = np.random.default_rng(0)
    channels = [grpc.aio.insecure_channel(address, options=OPTIONS) for _ in range(2)]
    streams, prompts = (GenerationServiceStub(channel) for channel in channels)
    loop = asyncio.get_running_loop()
    arrivals: list[list[tuple[float, int]]] = [[] for _ in range(_NUM_STREAMS)]  # of messages, with their tokens
    num_answered = 0

    async def stream(messages: list[tuple[float, int]]) -> None:
        spec = greedy_spec(_ids(rng, sizes, _STREAM_PROMPT_TOKENS), 3900, text=False)
        if target_s is not None:
            spec.latency_targets.inter_token.CopyFrom(from_nanoseconds(round(1e9 * target_s)))
        async for message in streams.StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
            if count := message.chunk.num_tokens:
                messages += [(loop.time(), count)]

    async def prompt() -> None:
        nonlocal num_answered
        spec = greedy_spec(_ids(rng, sizes, sizes.prompt_tokens), 1, text=False)
        async for message in prompts.StreamGenerate(pb.StreamGenerateRequest(spec=spec)):
            num_answered += message.chunk.num_tokens

    tasks = [asyncio.create_task(stream(messages)) for messages in arrivals]
    try:
        while not all(arrivals):
            await asyncio.sleep(0.01)
            _raise_failures(tasks)
        begin_s = loop.time()
        num_prompts = round(prompts_per_s * seconds)
        for number in range(num_prompts):
            await asyncio.sleep(begin_s + number / prompts_per_s - loop.time())
            tasks.append(asyncio.create_task(prompt()))
        await asyncio.sleep(begin_s + seconds - loop.time())
        _raise_failures(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for channel in channels:
            await channel.close()
    gaps_s = [
        (later_s - earlier_s) / count
        for messages in arrivals
        for (earlier_s, _), (later_s, count) in pairwise(messages)
        if later_s > begin_s
        for _ in range(count)
    ]
    return _Phase(gaps_s, num_prompts, num_answered)


def _ids(rng: np.random.Generator, sizes: _Sizes, count: int) -> Sequence[int]:
    ids: list[int] = rng.integers(1, sizes.vocab_size, count).tolist()
    return ids


def _raise_failures(tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Raises BenchmarkError if a call has failed."""
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            raise BenchmarkError(f"a call failed: {error}")


def _note(phase: _Phase, target_s: float) -> str:
    figures = ", ".join(f"{name} {percentile(phase.gaps_s, percent) / target_s:.2f}" for name, percent in _SHOWN)
    return (
        f"gap over target {figures} ({len(phase.gaps_s)} gaps; target {1e3 * target_s:.1f} ms); "
        f"{phase.num_answered} of {phase.num_prompts} prompts answered"
    )


_SHOWN = (("p50", 50), ("p90", 90), ("p99", 99), ("largest", 100))


def _outcome(phases: dict[str, _Phase], target_s: float) -> Outcome:
    solo = phases["solo"].gaps_s
    results = [
        Result(
            "",
            "solo gap of 16 streams, mean",
            1e3 * fmean(solo),
            "ms",
            note=f"p99 {1e3 * percentile(solo, 99):.1f} ms; the target is twice the mean",
        )
    ]
    for name, phase in phases.items():
        if name == "solo":
            continue
        is_governed = name == "slo"
        results.append(
            Result(
                "",
                f"{name}: p99 of the gap over the target",
                percentile(phase.gaps_s, 99) / target_s,
                "x",
                _GOAL_GOVERNED if is_governed else _GOAL_FIXED,
                "at most" if is_governed else "at least",
                note=_note(phase, target_s),
            )
        )
    raw = {"target_s": target_s, **{name: phase._asdict() for name, phase in phases.items()}}
    return Outcome(tuple(results), raw)
