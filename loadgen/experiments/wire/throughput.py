"""C19: throughput through the whole pair, against the same engine without a server.

Claim: the engine's step loop hides frontend, client and both streams.

Goal: 97 % of the tokens per second of the same engine called in its own process.

Method: one workload, 64 requests at once with prompts of 16 to 512 and outputs of 16 to 256 tokens, through an engine
without threads or sockets (`engine.bench.worker`) and through the pair with its client, in turn. All share the first
`--threads` CPUs. Greedy; both must give the same ids. Prompts are new in every round, so that nothing is cached.
"""

import argparse

from chairlift.bench.agreement import require_equal_ids
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.shapes import SHAPES, write_shape
from chairlift.bench.workload import mixed_workload
from loadgen.experiments.client import served_pair
from loadgen.experiments.peers.worker import BenchWorker
from loadgen.experiments.systems import compare, on_cpus

_IN_PROCESS, _OVER_GRPC = "in process", "over gRPC"
_GOAL = 97.0
_LIMITS = {"--max-num-seqs": 64, "--max-num-batched-tokens": 512, "--max-model-len": 1024}
_CACHE_BLOCKS = 64 * 1024 // 16  # room for all requests at their longest


def run(settings: Settings) -> Outcome:
    """Runs the experiment."""
    shape = "tiny" if settings.quick else settings.options.shape
    vocab_size = SHAPES[shape].vocab_size
    workload = mixed_workload(4 if settings.quick else 64, vocab_size=vocab_size)
    numbers = {**_LIMITS, "--num-gpu-blocks-override": _CACHE_BLOCKS, "--threads": settings.threads}
    flags = ["--model", str(write_shape(shape, settings.scratch)), "--load-format", "dummy"]
    flags += ["--block-size", "16", "--kv-cache-dtype", settings.options.kv_cache_dtype]
    flags += [] if settings.options.quantization == "none" else ["--quantization", settings.options.quantization]
    flags += [str(part) for item in numbers.items() for part in item]
    with on_cpus(settings.threads), BenchWorker(settings.scratch / "engine.log") as worker:
        settings.progress("loading")
        in_process = worker.load_engine(flags)
        with served_pair(flags, settings.scratch / "pair") as pair:
            comparison = compare(
                {_IN_PROCESS: in_process, _OVER_GRPC: pair},
                workload,
                vocab_size=vocab_size,
                measure=lambda run: run.wall_s,
                rounds=settings.rounds,
                progress=settings.progress,
            )
    for over_grpc, direct in zip(comparison.runs[_OVER_GRPC], comparison.runs[_IN_PROCESS], strict=True):
        require_equal_ids("over gRPC and in process", over_grpc.output_ids, direct.output_ids)
    ratio = comparison.samples.ratio(_IN_PROCESS, _OVER_GRPC)
    result = Result(
        "C19",
        "throughput over gRPC, of the engine's in process",
        100 * ratio.best,
        "%",
        _GOAL,
        floor=100.0,
        note=f"rounds {100 * ratio.low:.1f}..{100 * ratio.high:.1f}; {shape}, quantization "
        f"{settings.options.quantization}, KV cache {settings.options.kv_cache_dtype}",
    )
    rates = [
        Result("C19", f"{name}, output tokens/s", comparison.best_run(name).tokens_per_s)
        for name in comparison.samples.raw
    ]
    return Outcome((result, *rates), raw=comparison.raw())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M", help="model (default: 135M)")
    parser.add_argument("--quantization", choices=("none", "int8"), default="none", help="weights (default: none)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto", help="KV cache (default: auto)")
