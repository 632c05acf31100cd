"""Peers: is Chairlift the fastest way to serve this model on this CPU?

Claim: more output tokens per second than OpenVINO GenAI's continuous batching, in fp32 and in int8; 1.5 times as many
is aimed at.

Method: one random checkpoint, saved by `transformers`, is served by

- Chairlift: the whole pair over gRPC, that is an engine process, a frontend process and a client in this one; text and
  ids come back token by token;
- OpenVINO GenAI: `ContinuousBatchingPipeline` in a process of its own, driven by token ids without any network; fp32
  weights and cache, or int8 weights and u8 cache, its defaults. Its environment is made on the first run.

Like is compared with like: OpenVINO runs all requests of a workload at once (it ignores `max_num_seqs`), so Chairlift
has a slot for each; steps have the same token budget; in int8 both have an 8-bit cache. CPU seconds, the client's
included, stand beside wall time: on a machine that others use they say more.

Everything shares the first `--threads` CPUs. Both sides stay loaded and warm and run in turn; what the idle side costs
is measured. Before anything is timed, every id is judged by `transformers` in fp32, position by position: fp32 ids must
be its own up to near-ties, for int8 the agreement is printed.

Workloads: `mixed`, 64 requests at once, prompts of 16 to 512 tokens, outputs of 16, 64 or 256; `shared prefix`, 48
requests at once, 384 shared and 32 own prompt tokens, 32 out, where OpenVINO runs with and without its prefix cache and
its better figure counts; `alone`, one request of 32 tokens in and 64 out, where `transformers` (fp32) runs too. Prompts
are new in every round, so that nothing is cached from the round before. Greedy, end tokens ignored.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from chairlift.bench.benchmark import Benchmark, BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import Workload, mixed_workload, shared_prefix_workload
from engine.bench.agreement import greedy_agreement, load_reference, require_same_ids
from engine.bench.serve import Run
from engine.bench.shapes import SHAPES, save_checkpoint
from engine.bench.transformers_solo import TransformersSolo
from engine.config import EngineConfig
from loadgen.experiments.contest import Contender, Contest, check_lengths, compete, on_cpus, tpot_s
from loadgen.experiments.pair import Pair, engine_flags
from loadgen.experiments.peers.figures import CHAIRLIFT, Figures, alone_figures, throughput_figures
from loadgen.experiments.peers.openvino.contenders import OPENVINO_CACHED, open_openvino

TRANSFORMERS = "transformers"
PRECISIONS = ("fp32", "int8")
_LEAST_INT8_SHARE = 0.5  # of fp32's choices; below it the quantised model is another model

OpenPeers = Callable[[str, Path, Settings], AbstractContextManager[Mapping[str, Contender]]]
"""(precision, checkpoint, settings) -> the contenders beside Chairlift, loaded for the length of a with block."""


def run(settings: Settings, open_peers: OpenPeers = open_openvino) -> Outcome:
    """Runs the comparison; `open_peers` is another one in tests."""
    results: list[Result] = []
    raw: dict[str, object] = {}
    lines: list[str] = []
    shapes = ("tiny",) if settings.quick else tuple(settings.options.shapes)
    with on_cpus(settings.threads):
        for shape in shapes:
            settings.progress(f"saving a random checkpoint of shape {shape}")
            checkpoint = save_checkpoint(shape, settings.scratch)
            reference = load_reference(checkpoint)
            for precision in settings.options.precisions:
                comparison = _Comparison(checkpoint, precision, reference, settings)
                comparison.run(open_peers)
                results += comparison.results
                lines += comparison.lines
                raw[comparison.label] = comparison.raw
    return Outcome(tuple(results), raw, "\n".join(lines))


class _Comparison:
    """One shape in one precision.

    Attributes:
        results, lines, raw: what came out so far.
    """

    def __init__(self, checkpoint: Path, precision: str, reference: Any, settings: Settings) -> None:
        self.results: list[Result] = []
        self.lines: list[str] = []
        self.raw: dict[str, object] = {}
        self.label = f"{checkpoint.name} {precision}"
        self._checkpoint = checkpoint
        self._precision = precision
        self._reference = reference
        self._settings = settings

    def run(self, open_peers: OpenPeers) -> None:
        """Loads everybody, checks ids, then times."""
        settings = self._settings
        mixed, shared, alone = workloads(self._vocab_size, quick=settings.quick)
        with ExitStack() as stack:
            settings.progress(f"{self.label}: loading")
            peers = stack.enter_context(open_peers(self._precision, self._checkpoint, settings))
            num_slots = max(len(workload.prompts) for workload in (mixed, shared, alone))
            flags = engine_flags(engine_config(self._checkpoint, self._precision, settings.threads, num_slots))
            pair = stack.enter_context(Pair(flags, settings.scratch / self.label.replace(" ", "-")))
            contenders = {CHAIRLIFT: pair, **peers}
            judgements = judge_ids(contenders, mixed, self._reference, self._precision)
            self.raw["ids"] = judgements
            self.lines += [f"{self.label}: {name}: {judgement}" for name, judgement in judgements.items()]
            uncached = {name: contender for name, contender in contenders.items() if name != OPENVINO_CACHED}
            self._throughput("mixed", uncached, mixed)
            self._throughput("shared prefix", contenders, shared)
            if self._precision == "fp32":
                uncached[TRANSFORMERS] = TransformersSolo(self._reference)
            self._add(alone_figures(f"{self.label}, alone", self._compete("alone", uncached, alone, tpot_s)))

    @property
    def _vocab_size(self) -> int:
        return SHAPES[self._checkpoint.name].vocab_size

    def _throughput(self, title: str, contenders: Mapping[str, Contender], workload: Workload) -> None:
        contest = self._compete(title, contenders, workload, lambda run: run.wall_s)
        self._add(throughput_figures(f"{self.label}, {title}", contest))

    def _compete(
        self, title: str, contenders: Mapping[str, Contender], workload: Workload, measure: Callable[[Run], float]
    ) -> Contest:
        contest = compete(
            contenders,
            workload,
            vocab_size=self._vocab_size,
            measure=measure,
            rounds=self._settings.rounds,
            progress=lambda text: self._settings.progress(f"{self.label}, {title}: {text}"),
        )
        self.raw[title] = contest.raw()
        return contest

    def _add(self, figures: Figures) -> None:
        self.results += figures.results
        self.lines += figures.lines


def judge_ids(
    contenders: Mapping[str, Contender], workload: Workload, reference: Any, precision: str
) -> dict[str, str]:
    """Lets `transformers` judge every id of everybody's answers.

    Args:
        contenders: by name.
        workload: what they answer.
        reference: see `agreement.load_reference`.
        precision: fp32 ids must be right; of int8's only Chairlift's must be near.
    Returns: the judgement in words, by name.
    Raises: BenchmarkError: ids are wrong, so that no speed is worth anything.
    """
    judgements = {}
    for name, contender in contenders.items():
        run = contender.generate(workload)
        check_lengths(name, run, workload)
        agreement = greedy_agreement(reference, workload.prompts, run.output_ids)
        if precision == "fp32":
            require_same_ids(name, agreement)
        elif name == CHAIRLIFT and agreement.share_same < _LEAST_INT8_SHARE:
            raise BenchmarkError(f"int8 is far off: {agreement}")
        judgements[name] = str(agreement)
    return judgements


def engine_config(checkpoint: Path, precision: str, threads: int, num_slots: int) -> EngineConfig:
    """All else is Chairlift's default."""
    config = EngineConfig(model=str(checkpoint), threads=threads, max_num_seqs=num_slots)
    if precision == "int8":
        return dataclasses.replace(config, quantization="int8", kv_cache_dtype="int8")
    return dataclasses.replace(config, dtype="float32")


def workloads(vocab_size: int, *, quick: bool) -> tuple[Workload, Workload, Workload]:
    """Mixed, shared prefix, and alone."""
    if quick:
        mixed = mixed_workload(4, vocab_size=vocab_size)
        mixed = Workload(tuple(prompt[:32] for prompt in mixed.prompts), (8, 8, 8, 8))
        shared = shared_prefix_workload(4, shared_len=32, own_len=8, output_len=8, vocab_size=vocab_size)
        return mixed, shared, Workload(mixed.prompts[:1], (8,))
    mixed = mixed_workload(64, vocab_size=vocab_size)
    shared = shared_prefix_workload(48, shared_len=384, own_len=32, output_len=32, vocab_size=vocab_size)
    alone = shared_prefix_workload(1, shared_len=0, own_len=32, output_len=64, vocab_size=vocab_size)
    return mixed, shared, alone


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["15M", "135M"], help="models to serve")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))


BENCHMARK = Benchmark(
    name="peers",
    ids=(),
    summary="the whole pair over gRPC against OpenVINO GenAI, fp32 and int8",
    run=run,
    add_arguments=_add_arguments,
)
