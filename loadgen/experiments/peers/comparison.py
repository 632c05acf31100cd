"""Peers on a CPU: Chairlift against OpenVINO GenAI, and `transformers` for one request alone.

Claim: more output tokens per second than OpenVINO GenAI's continuous batching, in fp32 and in int8; the aim is 1.5
times as many.

Method: one random checkpoint, saved by `transformers`, is served by

- Chairlift: the whole pair over gRPC: an engine process, a frontend process and a client in this one; text and ids
  arrive token by token;
- OpenVINO GenAI: `ContinuousBatchingPipeline` in a process of its own, driven by token ids without any network; fp32
  weights and cache, or int8 weights and u8 cache, its defaults. Its environment is created on the first run.

Both sides get equal terms: OpenVINO runs all requests of a workload at once (it ignores `max_num_seqs`), so Chairlift
has a slot for each; steps have the same token budget; in int8 both have an 8-bit cache. CPU seconds, the client's
included, stand beside wall time, because they say more on a shared machine.

All systems share the first `--threads` CPUs. They stay loaded and warm and run in turn; the CPU time of idle systems is
measured. Before any timing, `transformers` judges every id in fp32, position by position: fp32 ids must equal its own
up to near-ties; for int8 the agreement is printed.

Workloads: `mixed`, 64 requests at once, prompts of 16 to 512 tokens, outputs of 16, 64 or 256; `shared prefix`, 48
requests at once, 384 shared and 32 own prompt tokens, 32 out, where OpenVINO runs with and without its prefix cache and
its better figure counts; `alone`, one request of 32 tokens in and 64 out, where `transformers` (fp32) runs too. Prompts
are new in every round, so that nothing is cached from the round before. Greedy, end tokens ignored.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from chairlift.bench.agreement import Agreement
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.shapes import SHAPES
from chairlift.bench.workload import Workload, mixed_workload, shared_prefix_workload
from loadgen.experiments.client import served_pair
from loadgen.experiments.peers.figures import CHAIRLIFT, Figures, alone_figures, throughput_figures
from loadgen.experiments.peers.openvino.pipelines import OPENVINO_CACHED, open_openvino
from loadgen.experiments.peers.worker import BenchWorker
from loadgen.experiments.systems import Comparison, System, check_lengths, compare, on_cpus, require_agreement, tpot_s

TRANSFORMERS = "transformers"
PRECISIONS = ("fp32", "int8")
STEP_TOKENS = 512

Judge = Callable[[Workload, Sequence[Sequence[int]]], Agreement]
OpenPeers = Callable[[str, Path, int, Settings], AbstractContextManager[Mapping[str, System]]]
"""(precision, checkpoint, tokens per step, settings) -> systems beside Chairlift, loaded for the length of a block."""


def run(settings: Settings, open_peers: OpenPeers = open_openvino) -> Outcome:
    """Runs the comparison; tests give other `open_peers`."""
    results: list[Result] = []
    raw: dict[str, object] = {}
    lines: list[str] = []
    shapes = ("tiny",) if settings.quick else tuple(settings.options.shapes)
    with on_cpus(settings.threads), BenchWorker(settings.scratch / "transformers.log") as reference:
        for shape in shapes:
            settings.progress(f"saving a random checkpoint of shape {shape}")
            checkpoint = reference.save_checkpoint(shape, settings.scratch)
            reference.load_transformers(checkpoint, settings.threads)
            for precision in settings.options.precisions:
                case = _Case(checkpoint, precision, reference, settings)
                case.run(open_peers)
                results += case.results
                lines += case.lines
                raw[case.label] = case.raw
    return Outcome(tuple(results), raw, "\n".join(lines))


class _Case:
    """One shape in one precision.

    Attributes:
        results, lines, raw: what came out so far.
    """

    def __init__(self, checkpoint: Path, precision: str, reference: BenchWorker, settings: Settings) -> None:
        self.results: list[Result] = []
        self.lines: list[str] = []
        self.raw: dict[str, object] = {}
        self.label = f"{checkpoint.name} {precision}"
        self._checkpoint = checkpoint
        self._precision = precision
        self._reference = reference
        self._settings = settings

    def run(self, open_peers: OpenPeers) -> None:
        """Loads all systems, checks their ids, then times them."""
        settings = self._settings
        mixed, shared, alone = workloads(self._vocab_size, quick=settings.quick)
        with ExitStack() as stack:
            settings.progress(f"{self.label}: loading")
            peers = stack.enter_context(open_peers(self._precision, self._checkpoint, STEP_TOKENS, settings))
            num_slots = max(len(workload.prompts) for workload in (mixed, shared, alone))
            flags = engine_flags(self._checkpoint, self._precision, settings.threads, num_slots)
            pair = stack.enter_context(served_pair(flags, settings.scratch / self.label.replace(" ", "-")))
            systems = {CHAIRLIFT: pair, **peers}
            judgements = judge_ids(systems, mixed, self._reference.judge, self._precision)
            self.raw["ids"] = judgements
            self.lines += [f"{self.label}: {name}: {judgement}" for name, judgement in judgements.items()]
            uncached = {name: system for name, system in systems.items() if name != OPENVINO_CACHED}
            self._throughput("mixed", uncached, mixed)
            self._throughput("shared prefix", systems, shared)
            if self._precision == "fp32":
                uncached[TRANSFORMERS] = self._reference.streaming()
            self._add(alone_figures(f"{self.label}, alone", self._compare("alone", uncached, alone, tpot_s)))

    @property
    def _vocab_size(self) -> int:
        return SHAPES[self._checkpoint.name].vocab_size

    def _throughput(self, title: str, systems: Mapping[str, System], workload: Workload) -> None:
        comparison = self._compare(title, systems, workload, lambda run: run.wall_s)
        self._add(throughput_figures(f"{self.label}, {title}", comparison))

    def _compare(
        self, title: str, systems: Mapping[str, System], workload: Workload, measure: Callable[[Run], float]
    ) -> Comparison:
        comparison = compare(
            systems,
            workload,
            vocab_size=self._vocab_size,
            measure=measure,
            rounds=self._settings.rounds,
            progress=lambda text: self._settings.progress(f"{self.label}, {title}: {text}"),
        )
        self.raw[title] = comparison.raw()
        return comparison

    def _add(self, figures: Figures) -> None:
        self.results += figures.results
        self.lines += figures.lines


def judge_ids(systems: Mapping[str, System], workload: Workload, judge: Judge, precision: str) -> dict[str, str]:
    """Judges every id of all systems' answers by `transformers`.

    Args:
        systems: by name.
        workload: what they answer.
        judge: compares answers with the choices of `transformers`.
        precision: fp32 ids must be right; for int8 only Chairlift's must be near.
    Returns: the judgement as text, by name.
    Raises: BenchmarkError: ids are wrong, so speed would mean nothing.
    """
    judgements = {}
    for name, system in systems.items():
        run = system.generate(workload)
        check_lengths(name, run, workload)
        agreement = judge(workload, run.output_ids)
        if precision == "fp32" or name == CHAIRLIFT:
            require_agreement(name, agreement, is_exact=precision == "fp32")
        judgements[name] = str(agreement)
    return judgements


def engine_flags(checkpoint: Path, precision: str, threads: int, num_slots: int) -> list[str]:
    """Command line of Chairlift's engine; all other settings are defaults."""
    types = ("--quantization", "int8", "--kv-cache-dtype", "int8") if precision == "int8" else ("--dtype", "float32")
    numbers = {"--threads": threads, "--max-num-seqs": num_slots, "--max-num-batched-tokens": STEP_TOKENS}
    return ["--model", str(checkpoint), *types, *(str(part) for item in numbers.items() for part in item)]


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=sorted(SHAPES),
        default=["15M", "135M"],
        help="models to serve (default: 15M 135M)",
    )
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="default: both")
