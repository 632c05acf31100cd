"""C3 and C2: our engine against `generate` of transformers, which batches statically and computes in fp32.

Claim: on the same machine, threads, checkpoint and requests, continuous batching on our own kernels gives several times
the tokens per second, in fp32 with the same greedy tokens.

Goal: C3, our fp32, at least 4 times as fast; C2, our int8, at least 10 times.

Method: C1's workload (32 prompt tokens, output lengths exponential with mean 64, at most 512) on 16 seats, but 64
requests instead of 256, which saves an hour and favours static batches. transformers gets batches of 16 in the order of
the requests; prompts of one length spare it all padding, and only the tokens asked for count. Every token of
transformers and of our fp32 is judged by a forward of transformers over prompt and answer before anything is timed;
int8 is another model, so its share of equal choices is printed. Then the three take turns. Prefix caching is off.
"""

import argparse

from chairlift.bench.benchmark import Benchmark, Outcome, Settings, positive
from chairlift.bench.workload import exponential_workload
from engine.bench.against_transformers import FP32, INT8, Goal, compare
from engine.bench.agreement import load_reference
from engine.bench.shapes import SHAPES, save_checkpoint
from engine.bench.transformers_model import generate

_NUM_SEATS = 16
_PROMPT_LEN = 32


def run(settings: Settings) -> Outcome:
    """Measures the three contestants in turn."""
    shape = "tiny" if settings.quick else settings.options.shape
    num_requests, mean, cap = (6, 4.0, 12) if settings.quick else (settings.options.requests, 64.0, 512)
    workload = exponential_workload(
        num_requests, prompt_len=_PROMPT_LEN, mean=mean, cap=cap, vocab_size=SHAPES[shape].vocab_size
    )
    model_dir = save_checkpoint(shape, settings.scratch)
    model = load_reference(model_dir)
    return compare(
        settings,
        workload,
        model_dir=model_dir,
        model=model,
        answer=lambda: generate(model, workload, _NUM_SEATS),
        max_num_seqs=_NUM_SEATS,
        goals={FP32: Goal("C3", 4.0), INT8: Goal("C2", 10.0)},
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M", help="default: 135M")
    parser.add_argument("--requests", type=positive, default=64, help="default: 64")


BENCHMARK = Benchmark(
    "transformers-generate", ("C3", "C2"), "against transformers' generate, fp32 and int8", run, _add_arguments
)
