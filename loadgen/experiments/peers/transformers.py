"""Chairlift's engine against `transformers` on the same machine, threads, checkpoint and requests.

C3, C2 (`transformers-generate`): against `generate`, which batches statically and computes in fp32. Goal: 4 times as
fast in fp32 (C3), 10 times in int8 (C2). 64 requests of 32 prompt tokens, output lengths exponential with mean 64 and
at most 512, on 16 slots; `generate` gets batches of 16 in the order of the requests. Prompts of one length need no
padding, and only the requested tokens count.

C4 (`transformers-generate-batch`): against its continuous batching, which is paged too, so that kernels and step
overhead make the difference. Goal: 2 times as fast in fp32, 5 times in int8. 64 requests at once, prompts of 64 to 512
tokens, outputs of 64 to 256, evenly drawn. It runs with its default page size and attention, a cache with room for all
requests, and steps of 512 tokens as ours (its default of thousands makes a step take seconds).

Both: every system is loaded in a worker without a server and called there. Before any timing, `transformers` judges
every id of all systems: those of fp32 must be its own up to near-ties; for int8 the agreement is printed. Then the
systems take turns. Prefix caching is off.
"""

import argparse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial

from chairlift.bench.agreement import Agreement
from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Outcome, Settings, positive
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.shapes import SHAPES
from chairlift.bench.workload import Workload, exponential_workload, uniform_workload
from loadgen.experiments.peers.worker import BenchWorker, WorkerSystem
from loadgen.experiments.systems import check_lengths, require_agreement

_FP32, _INT8, _TRANSFORMERS = "fp32", "int8", "transformers"
_NUM_SLOTS = 16
_PROMPT_LEN = 32


def against_generate(settings: Settings) -> Outcome:
    """Compares with `generate` (C3, C2)."""
    num_requests, mean, cap = (6, 4.0, 12) if settings.quick else (settings.options.requests, 64.0, 512)
    vocab_size = SHAPES[_shape(settings)].vocab_size
    workload = exponential_workload(num_requests, prompt_len=_PROMPT_LEN, mean=mean, cap=cap, vocab_size=vocab_size)
    goals = {_FP32: ("C3", 4.0), _INT8: ("C2", 10.0)}
    return _compare(settings, workload, lambda peer: peer.batches(_NUM_SLOTS), _NUM_SLOTS, goals)


def against_continuous(settings: Settings) -> Outcome:
    """Compares with continuous batching (C4)."""
    num_requests = 4 if settings.quick else settings.options.requests
    workload = uniform_workload(
        num_requests,
        prompt_lens=(4, 40) if settings.quick else (64, 512),
        output_lens=(4, 16) if settings.quick else (64, 256),
        vocab_size=SHAPES[_shape(settings)].vocab_size,
    )
    goals = {_FP32: ("C4", 2.0), _INT8: ("C4", 5.0)}
    return _compare(settings, workload, lambda peer: peer.continuous(workload), num_requests, goals)


def _compare(
    settings: Settings,
    workload: Workload,
    open_peer: Callable[[BenchWorker], WorkerSystem],
    num_slots: int,
    goals: Mapping[str, tuple[str, float]],
) -> Outcome:
    """Checks the ids of every system, then measures them in turn.

    Args:
        settings: rounds and threads.
        workload: what all systems answer.
        open_peer: makes the peer of a worker that has the checkpoint loaded.
        num_slots: `--max-num-seqs` of the engine.
        goals: by precision, id and ratio.
    Raises: BenchmarkError: an fp32 token is wrong, or int8 is too far off.
    """
    with ExitStack() as stack:
        judge, peer = (stack.enter_context(BenchWorker(settings.scratch / f"{name}.log")) for name in ("judge", "peer"))
        checkpoint = judge.save_checkpoint(_shape(settings), settings.scratch)
        for worker in (judge, peer):
            worker.load_transformers(checkpoint, settings.threads)
        systems = {_TRANSFORMERS: open_peer(peer)}
        max_model_len = max(map(len, workload.prompts)) + max(workload.max_tokens)
        flags = ["--model", str(checkpoint), "--max-num-seqs", str(num_slots), "--max-model-len", str(max_model_len)]
        flags += ["--no-enable-prefix-caching", "--threads", str(settings.threads)]  # prompts repeat in every round
        for precision, more in ((_FP32, ()), (_INT8, ("--quantization", "int8"))):
            worker = stack.enter_context(BenchWorker(settings.scratch / f"{precision}.log"))
            systems[precision] = worker.load_engine([*flags, *more])
        runs: dict[str, Run] = {}

        def timed(name: str) -> float:
            runs[name] = systems[name].generate(workload)
            check_lengths(name, runs[name], workload)
            return runs[name].wall_s

        agreements: dict[str, Agreement] = {}
        for name in systems:
            settings.progress(f"ids, and warm-up: {name} {timed(name):.4g}")
            agreements[name] = judge.judge(workload, runs[name].output_ids)
            settings.progress(f"{name}: {agreements[name]}")
            require_agreement(name, agreements[name], is_exact=name != _INT8)
        turns = {name: partial(timed, name) for name in systems}
        samples = alternate(turns, rounds=settings.rounds, warm_up=0, progress=settings.progress)
    num_equal = sum(a == b for a, b in zip(runs[_TRANSFORMERS].output_ids, runs[_FP32].output_ids, strict=True))
    notes = {
        _FP32: f"{num_equal} of {len(workload.prompts)} answers equal to the last token, "
        f"{agreements[_FP32].num_near_ties} near-ties chosen otherwise",
        _INT8: f"{100 * agreements[_INT8].share_same:.1f} % of tokens are fp32's choice",
    }
    results = [_result(precision, *goals[precision], samples, notes[precision]) for precision in (_FP32, _INT8)]
    rates = [
        Result(goals.get(name, goals[_FP32])[0], f"{name}, output tokens/s", workload.num_output_tokens / best_s)
        for name, best_s in ((name, samples.best(name)) for name in systems)
    ]
    return Outcome(
        (*results, *rates),
        raw={
            "seconds": samples.raw,
            "prompt_lens": [len(prompt) for prompt in workload.prompts],
            "max_tokens": workload.max_tokens,
            "agreement": {name: str(agreement) for name, agreement in agreements.items()},
        },
    )


def _result(precision: str, benchmark_id: str, goal: float, samples: Samples, note: str) -> Result:
    ratio = samples.ratio(_TRANSFORMERS, precision)
    what = f"seconds, transformers fp32 over Chairlift {precision}"
    return Result(benchmark_id, what, ratio.best, "x", goal, note=f"{ratio.low:.2f}..{ratio.high:.2f}; {note}")


def _shape(settings: Settings) -> str:
    return "tiny" if settings.quick else str(settings.options.shape)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M", help="model (default: 135M)")
    parser.add_argument("--requests", type=positive, default=64, metavar="N", help="number of requests (default: 64)")
