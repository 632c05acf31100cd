"""The pair over gRPC against `generate` of transformers, at every batch size.

Claim: padded static batches spend most of their work on padding, more so the larger they are; a pair that refills its
slots in every step gains from every slot.

Method: 64 prompts of 16 to 256 tokens, answers of 64, 256 or 1,024 tokens, drawn evenly and unordered. `transformers`
gets them in batches, prompts padded on the left to the longest of the batch, and runs each batch until its longest
answer is done, as `generate` does; only requested tokens count. The pair gets all requests at once and has as many
slots as the batch has rows; frontend, gRPC and a client are included. A batch of 128 holds the 64 prompts twice, and
the pair gets all of them twice too: with each prompt once it would be the batch of 64 again. Both compute in fp32 on
the same threads; prefix caching is off. `transformers` judges every token of both, of every round, before a figure is
printed. A round takes minutes, so the default is one round without warm-up. The cost of padding is counted in the
batches that were really computed. `--draw` draws both.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from chairlift.bench.agreement import Agreement, require_same_ids
from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Outcome, Settings, positive
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.shapes import SHAPES
from chairlift.bench.workload import Workload
from loadgen.experiments.client import served_pair
from loadgen.experiments.peers.batch_sizes import PAIR, TRANSFORMERS, Size, draw
from loadgen.experiments.peers.padding_waste import waste_of
from loadgen.experiments.peers.worker import BenchWorker
from loadgen.experiments.systems import check_lengths

_ROUNDS = 1
_SIZES = (4, 8, 16, 32, 64, 128)


def run(settings: Settings) -> Outcome:
    """Measures both at every size."""
    shape = "tiny" if settings.quick else settings.options.shape
    workload = _workload(settings, SHAPES[shape].vocab_size)
    rows = (2, 8) if settings.quick else tuple(settings.options.batch_sizes)
    with BenchWorker(settings.scratch / "transformers.log") as transformers:
        checkpoint = transformers.save_checkpoint(shape, settings.scratch)
        transformers.load_transformers(checkpoint, settings.threads)
        judge = Judge(transformers.judge)
        sizes = [_measure(settings, workload, transformers, checkpoint, judge, num_rows) for num_rows in rows]
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


def _measure(
    settings: Settings, workload: Workload, transformers: BenchWorker, checkpoint: Path, judge: "Judge", rows: int
) -> Size:
    """Runs the rounds at one batch size and judges the answers of each."""
    copies = -(-rows // len(workload.prompts))
    requests = Workload(workload.prompts * copies, workload.max_tokens * copies)
    max_model_len = max(len(p) + n for p, n in zip(requests.prompts, requests.max_tokens, strict=True))
    flags = ["--model", str(checkpoint), "--max-num-seqs", str(rows), "--max-model-len", str(max_model_len)]
    flags += ["--no-enable-prefix-caching", "--threads", str(settings.threads)]  # prompts repeat in every round
    notes: dict[str, str] = {}
    batches = transformers.batches(rows)
    with served_pair(flags, settings.scratch / str(rows)) as pair:

        def judged(name: str, generate: Callable[[Workload], Run]) -> Callable[[], float]:
            def measure() -> float:
                result = generate(requests)
                check_lengths(name, result, requests)
                notes[name] = judge.require_same_ids(f"{name}, {rows} rows", requests, result.output_ids)
                return result.wall_s

            return measure

        samples = alternate(
            {TRANSFORMERS: judged(TRANSFORMERS, batches.generate), PAIR: judged(PAIR, pair.generate)},
            rounds=settings.rounds,
            warm_up=0,
            progress=lambda text: settings.progress(f"{rows} rows, {text} s"),
        )
    for name, note in notes.items():
        settings.progress(f"{rows} rows, {name}: {note}")
    return Size(rows, samples, requests.num_output_tokens, waste_of(requests, rows, batches.batches), notes)


class Judge:
    """Judges answers, each one once: most come again at the next batch size.

    Args:
        judge: compares answers with a reference, see `BenchWorker.judge`.
    """

    def __init__(self, judge: Callable[[Workload, Sequence[Sequence[int]]], Agreement]) -> None:
        self._judge = judge
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Agreement] = {}

    def require_same_ids(self, name: str, workload: Workload, answers: Sequence[tuple[int, ...]]) -> str:
        """Returns the agreement as text; raises BenchmarkError if a token is wrong."""
        parts = []
        for prompt, answer in zip(workload.prompts, answers, strict=True):
            if (prompt, answer) not in self._known:
                self._known[prompt, answer] = self._judge(Workload((prompt,), (len(answer),)), [answer])
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
            f"{size.rows} rows: seconds, transformers over Chairlift",
            ratio.best,
            "x",
            note=f"{ratio.low:.2f}..{ratio.high:.2f}; tokens/s {size.tokens_per_s(TRANSFORMERS):,.0f} and "
            f"{size.tokens_per_s(PAIR):,.0f}",
        ),
        Result(
            "batches",
            f"{size.rows} rows: tokens that transformers computed unrequested",
            100 * waste.share,
            "%",
            note=f"{waste.computed:,} tokens: {waste.useful:,} requested, {waste.prompt_padding:,} padding, "
            f"{waste.idle_rows:,} after the end of answers",
        ),
    ]


def _summary(sizes: Sequence[Size]) -> str:
    """Returns the results as text."""
    lines = []
    for name in (TRANSFORMERS, PAIR):
        best = max(sizes, key=lambda size: size.tokens_per_s(name))
        lines.append(f"{name} is fastest with {best.rows} rows: {best.tokens_per_s(name):,.0f} tokens/s.")
    for size in (sizes[0], sizes[-1]):
        faster = size.tokens_per_s(PAIR) / size.tokens_per_s(TRANSFORMERS)
        padded = 1 / (1 - size.waste.share)
        lines.append(
            f"With {size.rows} rows Chairlift is {faster:.2f} times as fast. The padded batches compute {padded:.2f} "
            f"times the requested tokens; kernels and steps account for the remaining {faster / padded:.2f} times."
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.set_defaults(rounds=_ROUNDS)  # a round takes minutes
    parser.add_argument("--shape", choices=sorted(SHAPES), default="15M", help="model (default: 15M)")
    parser.add_argument(
        "--batch-sizes",
        type=positive,
        nargs="+",
        default=_SIZES,
        metavar="N",
        help="rows of a batch and slots of the pair (default: 4 8 16 32 64 128)",
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write a picture of both: a .svg or .png file")
