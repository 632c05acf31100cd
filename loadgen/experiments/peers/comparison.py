"""Peers on a CPU: Chairlift against OpenVINO GenAI and llama.cpp, and `transformers` for one request alone.

Claim: more output tokens per second than the peer's continuous batching in every number format; the aim is 1.5 times as
many.

Method: one random checkpoint, saved by `transformers`, is served by

- Chairlift: the whole pair over gRPC: an engine process, a frontend process and a client in this one; text and ids
  arrive token by token;
- OpenVINO GenAI (fp32, int8, bf16): `ContinuousBatchingPipeline` in a process of its own, driven by token ids without
  any network. fp32 has weights, products and cache in fp32. int8 (with a u8 cache) and bf16 (with a bf16 cache) keep
  its default precision of products, bf16 where the CPU has it;
- llama.cpp (Q8_0, Q4_K_M; F16 and BF16 if asked for): `llama_decode` of its C API in a process of its own, driven by
  token ids without any network, with the slots and batches of `llama-server -np 16` and `-np 1`. The checkpoint becomes
  a GGUF file, quantised by llama.cpp, that both sides read.

The peers' environments are made on the first run: OpenVINO's is downloaded, llama.cpp is built.

Both sides get equal terms. OpenVINO runs all requests of a workload at once (it ignores `max_num_seqs`), so Chairlift
has a slot for each; beside llama.cpp it has 16. Steps have the same token budget. In int8 both have an 8-bit cache, in
bf16 and GGUF files one of 16 bits. llama.cpp rounds the inputs of its products to int8, so Chairlift does it too
(`--quantization int8`); in the formats `Q8_0-exact` and `Q4_K_M-exact` it runs with its defaults, which round nothing.
CPU seconds, the client's included, stand beside wall time, because they say more on a shared machine.

All systems share the first `--threads` CPUs. They stay loaded and warm and run in turn; the CPU time of idle systems is
measured. Before any timing, `transformers` judges ids in fp32 on the numbers that are stored, position by position:
fp32 ids must equal its own up to near-ties; for other formats, where a side may round activations to 8 or 16 bits, the
agreement of both sides is printed.

Workloads: `mixed`, 64 requests at once, prompts of 16 to 512 tokens, outputs of 16, 64 or 256; `shared-prefix`, 48
requests at once, 384 shared and 32 own prompt tokens, 32 out, where OpenVINO runs with and without its prefix cache and
its better figure counts; `alone`, the latency of one request of 32 tokens in and 64 out, where `transformers` (fp32,
bf16) runs too, and Chairlift's engine in process, without the wire that the peers do not have either;
`decode`, 32 requests (16 beside llama.cpp) of 96 tokens in and 64 out, while all of them decode. Prompts are new in
every round, so that nothing is cached from the round before. Greedy, end tokens ignored.
"""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

from chairlift.bench.agreement import Agreement
from chairlift.bench.benchmark import Outcome, Settings, positive
from chairlift.bench.report import Result
from chairlift.bench.run import Run
from chairlift.bench.shapes import SHAPES
from chairlift.bench.workload import Workload, mixed_workload, shared_prefix_workload
from loadgen.experiments.client import served_pair
from loadgen.experiments.peers.figures import CHAIRLIFT, IN_PROCESS, Figures, latency_figures, throughput_figures
from loadgen.experiments.peers.formats import DEFAULT_FORMATS, FORMATS, NumberFormat, Terms
from loadgen.experiments.peers.llama_cpp.servers import LLAMA_CPP, LLAMA_CPP_ALONE, open_llama_cpp, quantize_gguf
from loadgen.experiments.peers.openvino.pipelines import OPENVINO_CACHED, open_openvino
from loadgen.experiments.peers.worker import BenchWorker
from loadgen.experiments.systems import (
    Comparison,
    System,
    check_lengths,
    compare,
    decode_s,
    latency_s,
    on_cpus,
    require_agreement,
)

TRANSFORMERS = "transformers"
MIXED, SHARED_PREFIX, ALONE, DECODE = WORKLOADS = ("mixed", "shared-prefix", "alone", "decode")
STEP_TOKENS = 512
GGUF_SLOTS = 16

Judge = Callable[[Workload, Sequence[Sequence[int]]], Agreement]
OpenPeers = Callable[[NumberFormat, Path, Terms, Settings], AbstractContextManager[Mapping[str, System]]]
"""(format, checkpoint or GGUF file, terms, settings) -> systems beside Chairlift, loaded for the length of a block."""


class Peers(NamedTuple):
    """How peers are opened.

    Attributes:
        openvino: for formats without a GGUF file.
        llama_cpp: for the others.
        quantize: writes a GGUF file in another format: source, out, format, settings.
    """

    openvino: OpenPeers = open_openvino
    llama_cpp: OpenPeers = open_llama_cpp
    quantize: Callable[[Path, Path, NumberFormat, Settings], None] = quantize_gguf


class Files(NamedTuple):
    """The checkpoint or GGUF file that is served, and the checkpoint with its numbers, by which ids are judged."""

    model: Path
    judged: Path


def run(settings: Settings, peers: Peers | None = None) -> Outcome:
    """Runs the comparison; tests give other `peers`."""
    results: list[Result] = []
    raw: dict[str, object] = {}
    lines: list[str] = []
    shapes = ("tiny",) if settings.quick else tuple(settings.options.shapes)
    with on_cpus(settings.threads), BenchWorker(settings.scratch / "transformers.log") as reference:
        for shape in shapes:
            for name in settings.options.formats:
                case = _Case(shape, FORMATS[name], reference, settings)
                case.run(peers or Peers())
                results += case.results
                lines += case.lines
                raw[case.label] = case.raw
    return Outcome(tuple(results), raw, "\n".join(lines))


class _Case:
    """One shape in one number format.

    Attributes:
        results, lines, raw: what came out so far.
    """

    def __init__(self, shape: str, number_format: NumberFormat, reference: BenchWorker, settings: Settings) -> None:
        self.results: list[Result] = []
        self.lines: list[str] = []
        self.raw: dict[str, object] = {}
        self.label = f"{shape} {number_format.name}"
        self._shape = shape
        self._format = number_format
        self._reference = reference
        self._settings = settings

    def run(self, peers: Peers) -> None:
        """Loads all systems, checks their ids, then times them."""
        settings, number_format = self._settings, self._format
        chosen = workloads(self._vocab_size, max_rows=GGUF_SLOTS if number_format.gguf else 32, quick=settings.quick)
        terms = terms_of(chosen.values(), number_format)
        files = self._write_model(peers)
        with ExitStack() as stack:
            settings.progress(f"{self.label}: loading")
            open_peers = peers.llama_cpp if number_format.gguf else peers.openvino
            systems = dict(stack.enter_context(open_peers(number_format, files.model, terms, settings)))
            flags = engine_flags(files.model, number_format, settings.threads, terms)
            pair = stack.enter_context(served_pair(flags, settings.scratch / self.label.replace(" ", "-")))
            systems = {CHAIRLIFT: pair, **systems}
            self._reference.load_transformers(files.judged, settings.threads)
            judged = first_requests(chosen[MIXED], settings.options.judged)
            judgements = judge_ids(systems, judged, self._reference.judge, is_exact=number_format.is_exact)
            self.raw["ids"] = judgements
            self.lines += [f"{self.label}: {name}: {judgement}" for name, judgement in judgements.items()]
            if ALONE in settings.options.workloads:
                in_process = stack.enter_context(BenchWorker(settings.scratch / f"engine-{number_format.name}.log"))
                systems[IN_PROCESS] = in_process.load_engine(flags)
                if number_format.alone_dtype is not None:
                    systems[TRANSFORMERS] = self._transformers(stack, files.judged, number_format.alone_dtype)
            for title in settings.options.workloads:
                self._time(title, {name: systems[name] for name in candidates(title, systems)}, chosen[title])

    def _write_model(self, peers: Peers) -> Files:
        """Writes the model that both sides serve."""
        settings, number_format, reference = self._settings, self._format, self._reference
        settings.progress(f"{self.label}: saving a random checkpoint")
        folder = settings.scratch / number_format.checkpoint_dtype
        checkpoint = reference.save_checkpoint(self._shape, folder, number_format.checkpoint_dtype)
        if not number_format.gguf:
            return Files(checkpoint, checkpoint)
        name = f"{self._shape}-{number_format.name}"
        model, twin = settings.scratch / f"{name}.gguf", settings.scratch / f"{name}-twin"
        stored = settings.scratch / f"{self._shape}-{number_format.stored}.gguf"
        reference.save_gguf(checkpoint, stored, number_format.stored)
        if stored != model:
            settings.progress(f"{self.label}: quantising")
            peers.quantize(stored, model, number_format, settings)
            stored.unlink()
        reference.save_twin(model, checkpoint, twin)
        return Files(model, twin)

    def _transformers(self, stack: ExitStack, checkpoint: Path, dtype: str) -> System:
        """Returns `transformers` in a dtype: the judge's own model if it has that."""
        if dtype == "float32":
            return self._reference.streaming()
        worker = stack.enter_context(BenchWorker(self._settings.scratch / f"transformers-{dtype}.log"))
        worker.load_transformers(checkpoint, self._settings.threads, dtype)
        return worker.streaming()

    @property
    def _vocab_size(self) -> int:
        return SHAPES[self._shape].vocab_size

    def _time(self, title: str, systems: Mapping[str, System], workload: Workload) -> None:
        label = f"{self.label}, {title}"
        measure: Callable[[Run], float]
        figures: Callable[[str, Comparison], Figures]
        match title:
            case "alone":
                measure, figures = latency_s, latency_figures
            case "decode":
                label, measure, figures = f"{label} of {len(workload.prompts)}", decode_s, latency_figures
            case _:
                measure, figures = _wall_s, throughput_figures
        comparison = compare(
            systems,
            workload,
            vocab_size=self._vocab_size,
            measure=measure,
            rounds=self._settings.rounds,
            progress=lambda text: self._settings.progress(f"{label}: {text}"),
        )
        self.raw[title] = comparison.raw()
        found = figures(label, comparison)
        self.results += found.results
        self.lines += found.lines


def _wall_s(run: Run) -> float:
    return run.wall_s


def candidates(title: str, names: Sequence[str] | Mapping[str, System]) -> list[str]:
    """Returns the systems that a workload is for.

    Args:
        title: of the workload.
        names: of all systems.
    """
    left_out = {
        MIXED: {TRANSFORMERS, OPENVINO_CACHED, IN_PROCESS},
        SHARED_PREFIX: {TRANSFORMERS, IN_PROCESS},
        ALONE: {OPENVINO_CACHED, LLAMA_CPP},
        DECODE: {TRANSFORMERS, OPENVINO_CACHED, LLAMA_CPP_ALONE, IN_PROCESS},
    }
    return [name for name in names if name not in left_out[title]]


def judge_ids(systems: Mapping[str, System], workload: Workload, judge: Judge, *, is_exact: bool) -> dict[str, str]:
    """Judges every id of all systems' answers by `transformers`.

    Args:
        systems: by name.
        workload: what they answer.
        judge: compares answers with the choices of `transformers`.
        is_exact: all ids must be right; otherwise only Chairlift's must be near.
    Returns: the judgement as text, by name.
    Raises: BenchmarkError: ids are wrong, so speed would mean nothing.
    """
    judgements = {}
    for name, system in systems.items():
        run = system.generate(workload)
        check_lengths(name, run, workload)
        agreement = judge(workload, run.output_ids)
        if is_exact or name == CHAIRLIFT:
            require_agreement(name, agreement, is_exact=is_exact)
        judgements[name] = str(agreement)
    return judgements


def terms_of(chosen: Collection[Workload], number_format: NumberFormat) -> Terms:
    """Returns what both sides get alike: a slot for every request, or 16 beside llama.cpp."""
    num_slots = GGUF_SLOTS if number_format.gguf else max(len(workload.prompts) for workload in chosen)
    lengths = (
        len(prompt) + limit
        for workload in chosen
        for prompt, limit in zip(workload.prompts, workload.max_tokens, strict=True)
    )
    return Terms(STEP_TOKENS, num_slots, max(lengths))


def engine_flags(model: Path, number_format: NumberFormat, threads: int, terms: Terms) -> list[str]:
    """Command line of Chairlift's engine; all other settings are defaults."""
    numbers = {
        "--threads": threads,
        "--max-num-seqs": terms.num_slots,
        "--max-num-batched-tokens": terms.step_tokens,
    }
    return [
        "--model",
        str(model),
        *number_format.engine_flags,
        *(str(part) for item in numbers.items() for part in item),
    ]


def workloads(vocab_size: int, *, max_rows: int, quick: bool) -> dict[str, Workload]:
    """All workloads by name; `max_rows` requests decode together."""

    def apart(num_requests: int, prompt_len: int, output_len: int) -> Workload:
        return shared_prefix_workload(
            num_requests, shared_len=0, own_len=prompt_len, output_len=output_len, vocab_size=vocab_size
        )

    if quick:
        mixed = mixed_workload(4, vocab_size=vocab_size)
        mixed = Workload(tuple(prompt[:32] for prompt in mixed.prompts), (8, 8, 8, 8))
        shared = shared_prefix_workload(4, shared_len=32, own_len=8, output_len=8, vocab_size=vocab_size)
        return {MIXED: mixed, SHARED_PREFIX: shared, ALONE: apart(1, 8, 8), DECODE: apart(4, 8, 24)}
    return {
        MIXED: mixed_workload(64, vocab_size=vocab_size),
        SHARED_PREFIX: shared_prefix_workload(48, shared_len=384, own_len=32, output_len=32, vocab_size=vocab_size),
        ALONE: apart(1, 32, 64),
        DECODE: apart(max_rows, 96, 64),
    }


def first_requests(workload: Workload, count: int) -> Workload:
    """The first requests of a workload."""
    return Workload(workload.prompts[:count], workload.max_tokens[:count])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--shapes",
        nargs="+",
        choices=sorted(SHAPES),
        default=["15M", "135M"],
        help="models to serve (default: 15M 135M)",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=tuple(FORMATS),
        default=list(DEFAULT_FORMATS),
        help=f"number formats (default: {' '.join(DEFAULT_FORMATS)})",
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="what is timed (default: all)"
    )
    parser.add_argument(
        "--judged",
        type=positive,
        default=64,
        metavar="N",
        help="requests of the mixed workload whose ids are judged; fewer save time with large models (default: 64)",
    )
