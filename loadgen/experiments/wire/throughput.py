"""C19: what does serving through gRPC cost in throughput?

Claim: the engine's step loop hides frontend, client and both streams.

Goal: 97 % of the tokens per second of the same engine called in process.

Method: one workload, 64 requests at once with prompts of 16 to 512 and outputs of 16 to 256 tokens, through an engine
in this process, without threads or sockets, and through the pair with its client, in turn. All share the first
`--threads` CPUs. Greedy; both must give the same ids. Prompts are new in every round, so that nothing is cached.
"""

import argparse

from chairlift.bench.benchmark import Benchmark, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload, mixed_workload
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.rounds import require_equal_ids
from engine.bench.serve import Run, engine, serve
from engine.serving.engine import EngineParts
from loadgen.experiments.contest import compete, on_cpus
from loadgen.experiments.pair import Pair, engine_flags

_IN_PROCESS, _OVER_GRPC = "in process", "over gRPC"
_GOAL = 97.0


class _InProcess:
    """An engine in this process as a contender."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def generate(self, workload: Workload) -> Run:
        """See `Contender.generate`."""
        return serve(self._parts, workload.prompts, workload.max_tokens)

    @property
    def pids(self) -> frozenset[int]:
        """None of its own."""
        return frozenset()


def _run(settings: Settings) -> Outcome:
    vocab_size = chosen_shape(settings).vocab_size
    workload = mixed_workload(4 if settings.quick else 64, vocab_size=vocab_size)
    config = engine_config(settings, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=1024)
    with on_cpus(settings.threads):
        settings.progress("loading")
        in_process = _InProcess(engine(config))
        with Pair(engine_flags(config), settings.scratch / "pair") as pair:
            contest = compete(
                {_IN_PROCESS: in_process, _OVER_GRPC: pair},
                workload,
                vocab_size=vocab_size,
                measure=lambda run: run.wall_s,
                rounds=settings.rounds,
                progress=settings.progress,
            )
    for ours, theirs in zip(contest.runs[_OVER_GRPC], contest.runs[_IN_PROCESS], strict=True):
        require_equal_ids("over gRPC and in process", ours.output_ids, theirs.output_ids)
    ratio = contest.samples.ratio(_IN_PROCESS, _OVER_GRPC)
    result = Result(
        "C19",
        "throughput over gRPC, of the engine's in process",
        100 * ratio.best,
        "%",
        _GOAL,
        floor=100.0,
        note=f"rounds {100 * ratio.low:.1f}..{100 * ratio.high:.1f}; {describe(settings)}",
    )
    rates = [
        Result("C19", f"{name}, output tokens/s", contest.best_run(name).tokens_per_s) for name in contest.samples.raw
    ]
    return Outcome((result, *rates), raw=contest.raw())


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser, shape="135M")


BENCHMARK = Benchmark(
    name="wire-throughput",
    ids=("C19",),
    summary="throughput through the whole pair against the engine in process",
    run=_run,
    add_arguments=_add_arguments,
)
