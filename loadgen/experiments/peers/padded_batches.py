"""Our pair over gRPC against `generate` of transformers, at every size of batch.

Claim: padded static batches spend most of their work on padding, and the more of it the larger they are; a pair that
refills its seats in every step gains from every seat it gets.

Method: 64 prompts of 16 to 256 tokens, answers of 64, 256 or 1,024 tokens, drawn evenly and in no order.
`transformers` gets them in batches, prompts padded on the left to the longest of the batch, and runs each until its
longest answer is done, as `generate` does; only the tokens asked for count. The pair gets them all at once and has as
many seats as the batch has rows; frontend, gRPC and a client are included. A batch of 128 holds the 64 prompts twice,
and the pair is asked for all of them twice too: with each prompt once it would be the batch of 64 again. Both compute
in fp32 on the same threads; prefix caching is off. Every token of both, of every round, is judged by a forward of
transformers over prompt and answer before a figure is printed. A round takes minutes, so that there is one by default
and none to warm up. What padding costs is counted in the batches that were really computed. `--draw` draws both.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Benchmark, BenchmarkError, Outcome, Settings, positive
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload
from engine.bench.agreement import Agreement, greedy_agreement, load_reference, require_same_ids
from engine.bench.shapes import SHAPES, save_checkpoint
from engine.bench.transformers_model import Answers, generate_padded
from engine.config import EngineConfig
from loadgen.experiments.pair import Pair, engine_flags
from loadgen.experiments.peers.batch_sizes import PAIR, TRANSFORMERS, Size, draw
from loadgen.experiments.peers.padding_waste import PaddedBatch, waste_of

_ROUNDS = 1
_SIZES = (4, 8, 16, 32, 64, 128)


def run(settings: Settings) -> Outcome:
    """Measures both at every size."""
    shape = "tiny" if settings.quick else settings.options.shape
    workload = _workload(settings, SHAPES[shape].vocab_size)
    model_dir = save_checkpoint(shape, settings.scratch)
    torch.set_num_threads(settings.threads)
    model = load_reference(model_dir)
    judge = Judge(model)
    rows = (2, 8) if settings.quick else tuple(settings.options.batch_sizes)
    sizes = [_measure(settings, workload, model, model_dir, judge, num_rows) for num_rows in rows]
    answers = "/".join(f"{length:,}" for length in sorted(set(workload.max_tokens)))
    lengths = [len(prompt) for prompt in workload.prompts]
    title = (
        f"{shape}, fp32, {settings.threads} threads: {len(lengths)} prompts of {min(lengths)} to {max(lengths)} "
        f"tokens, answers of {answers}"
    )
    if settings.options.draw is not None:
        draw(sizes, title, settings.options.draw)
    return Outcome(
        tuple(result for size in sizes for result in _results(size)),
        raw={
            "seconds": {size.rows: size.samples.raw for size in sizes},
            "waste": {size.rows: asdict(size.waste) for size in sizes},
            "agreement": {size.rows: size.notes for size in sizes},
            "prompt_lens": lengths,
            "max_tokens": workload.max_tokens,
        },
        text=f"{title}\n{_summary(sizes)}",
    )


def _workload(settings: Settings, vocab_size: int) -> Workload:
    num_requests, prompt_lens, answers = (
        (6, (2, 12), (2, 6, 12)) if settings.quick else (64, (16, 256), (64, 256, 1024))
    )
    rng = np.random.default_rng(0)
    lengths = rng.integers(prompt_lens[0], prompt_lens[1] + 1, num_requests)
    prompts = tuple(tuple(rng.integers(1, vocab_size, length).tolist()) for length in lengths)
    return Workload(prompts, tuple(rng.choice(answers, num_requests).tolist()))


def _measure(settings: Settings, workload: Workload, model: Any, model_dir: Path, judge: "Judge", rows: int) -> Size:
    """Rounds at one size of batch, the answers of each judged as soon as they are there."""
    copies = -(-rows // len(workload.prompts))
    requests = Workload(workload.prompts * copies, workload.max_tokens * copies)
    config = EngineConfig(
        model=str(model_dir),
        max_num_seqs=rows,
        max_model_len=max(len(p) + n for p, n in zip(requests.prompts, requests.max_tokens, strict=True)),
        enable_prefix_caching=False,  # every round has the same prompts
        threads=settings.threads,
    )
    answers: dict[str, Answers] = {}
    notes: dict[str, str] = {}
    batches: list[PaddedBatch] = []
    with Pair(engine_flags(config), settings.scratch / str(rows)) as pair:

        def ask_transformers() -> float:
            started_s = time.perf_counter()
            answers[TRANSFORMERS], batches[:] = generate_padded(model, requests, rows)
            return time.perf_counter() - started_s

        def ask_pair() -> float:
            served = pair.generate(requests)
            answers[PAIR] = served.output_ids
            return served.wall_s

        def judged(name: str, ask: Callable[[], float]) -> Callable[[], float]:
            def measure() -> float:
                seconds = ask()
                notes[name] = judge.require_same_ids(f"{name}, {rows} rows", requests, answers[name])
                return seconds

            return measure

        samples = alternate(
            {TRANSFORMERS: judged(TRANSFORMERS, ask_transformers), PAIR: judged(PAIR, ask_pair)},
            rounds=settings.rounds,
            warm_up=0,
            progress=lambda text: settings.progress(f"{rows} rows, {text} s"),
        )
    for name, note in notes.items():
        settings.progress(f"{rows} rows, {name}: {note}")
    return Size(rows, samples, requests.num_output_tokens, waste_of(batches), notes)


class Judge:
    """Judges answers by `greedy_agreement`, each one once: most come again at the next size of batch."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Agreement] = {}

    def require_same_ids(self, name: str, workload: Workload, answers: Answers) -> str:
        """Says how the answers agree.

        Raises: BenchmarkError: an answer has another length than was asked for, or a token that is wrong.
        """
        parts = []
        for prompt, length, answer in zip(workload.prompts, workload.max_tokens, answers, strict=True):
            if len(answer) != length:
                raise BenchmarkError(f"{name}: an answer has {len(answer)} tokens, {length} were asked for")
            if (prompt, answer) not in self._known:
                self._known[prompt, answer] = greedy_agreement(self._model, [prompt], [answer])
            parts.append(self._known[prompt, answer])
        agreement = Agreement(
            num_tokens=sum(part.num_tokens for part in parts),
            num_same=sum(part.num_same for part in parts),
            num_near_ties=sum(part.num_near_ties for part in parts),
            worst_gap=max(part.worst_gap for part in parts),
        )
        require_same_ids(name, agreement)
        return str(agreement)


def _results(size: Size) -> list[Result]:
    waste, ratio = size.waste, size.samples.ratio(TRANSFORMERS, PAIR)
    return [
        Result(
            "batches",
            f"{size.rows} rows: seconds, transformers over ours",
            ratio.best,
            "x",
            note=f"{ratio.low:.2f}..{ratio.high:.2f}; tokens/s {size.tokens_per_s(TRANSFORMERS):,.0f} and "
            f"{size.tokens_per_s(PAIR):,.0f}",
        ),
        Result(
            "batches",
            f"{size.rows} rows: of what transformers computed, nobody asked for",
            100 * waste.share,
            "%",
            note=f"{waste.computed:,} tokens: {waste.useful:,} asked for, {waste.prompt_padding:,} in front of "
            f"prompts, {waste.idle_rows:,} after the end of answers",
        ),
    ]


def _summary(sizes: Sequence[Size]) -> str:
    """What came out, in words."""
    lines = []
    for name in (TRANSFORMERS, PAIR):
        best = max(sizes, key=lambda size: size.tokens_per_s(name))
        lines.append(f"{name} is fastest with {best.rows} rows: {best.tokens_per_s(name):,.0f} tokens/s.")
    for size in (sizes[0], sizes[-1]):
        faster = size.tokens_per_s(PAIR) / size.tokens_per_s(TRANSFORMERS)
        padded = 1 / (1 - size.waste.share)
        lines.append(
            f"With {size.rows} rows ours is {faster:.2f} times as fast. The padded batches compute {padded:.2f} times "
            f"what was asked for; that leaves {faster / padded:.2f} times for kernels and the cost of a step."
        )
    return "\n".join(lines)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(rounds=_ROUNDS)  # a round takes minutes
    parser.add_argument("--shape", choices=sorted(SHAPES), default="15M", help="default: 15M")
    parser.add_argument(
        "--batch-sizes", type=positive, nargs="+", default=_SIZES, metavar="N", help="default: 4 8 16 32 64 128"
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw both: a .svg or .png file")


BENCHMARK = Benchmark(
    "transformers-batches", (), "the pair over gRPC against transformers' generate, batch 4 to 128", run, _add_arguments
)
