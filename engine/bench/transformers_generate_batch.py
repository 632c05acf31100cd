"""C4: our engine against `generate_batch` of transformers, which is paged and continuous like ours.

Claim: with the same scheduling on both sides, kernels and step overhead still make the difference.

Goal: our fp32 at least 2 times as fast, our int8 at least 5 times.

Method: 64 requests at once, prompts of 64 to 512 tokens, outputs of 64 to 256, evenly drawn. transformers runs in fp32
with its default page size and attention, a cache with room for all requests, a step of 512 tokens (our own; its default
of thousands makes a step take seconds) and requests of individual lengths, which `generate_batch` itself cannot express
but the manager below it can. Building both is not timed. Ids are judged as in C3, then the three take turns.
"""

import argparse

from chairlift.bench.benchmark import Benchmark, Outcome, Settings, positive
from chairlift.bench.workload import uniform_workload
from engine.bench.against_transformers import FP32, INT8, Goal, compare
from engine.bench.agreement import load_reference
from engine.bench.shapes import SHAPES, save_checkpoint
from engine.bench.transformers_model import batch_generator


def run(settings: Settings) -> Outcome:
    """Measures the three contestants in turn."""
    shape = "tiny" if settings.quick else settings.options.shape
    num_requests = 4 if settings.quick else settings.options.requests
    workload = uniform_workload(
        num_requests,
        prompt_lens=(4, 40) if settings.quick else (64, 512),
        output_lens=(4, 16) if settings.quick else (64, 256),
        vocab_size=SHAPES[shape].vocab_size,
    )
    model_dir = save_checkpoint(shape, settings.scratch)
    model = load_reference(model_dir)
    with batch_generator(model, workload) as answer:
        return compare(
            settings,
            workload,
            model_dir=model_dir,
            model=load_reference(model_dir),
            answer=lambda: answer(workload),
            max_num_seqs=num_requests,
            goals={FP32: Goal("C4", 2.0), INT8: Goal("C4", 5.0)},
        )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M", help="default: 135M")
    parser.add_argument("--requests", type=positive, default=64, help="default: 64")


BENCHMARK = Benchmark(
    "transformers-generate-batch", ("C4",), "against transformers' generate_batch, fp32 and int8", run, _add_arguments
)
