"""Speed of a decode step by the dtype in which a CPU stores weights.

Claim: weights in bf16 are widened in registers, so that a step reads half the bytes and computes as much.

Goal: a step with weights in bf16 takes at most the time of the same step in fp32, with one row and with 32. A step of
transformers in bf16 is printed beside them.

Method: decode-only steps at a context of 128, random weights, on two engines that differ in --dtype only; a run's
figure is its median step. transformers computes one token for the same number of rows at the same context, greedily, by
a forward of the model with its own cache, on the same number of threads.
"""

import argparse

import torch

from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.shapes import write_shape
from engine.bench.decode_steps import (
    MAX_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    MAX_ROWS,
    chairlift_step,
    compare_steps,
    transformers_step,
)
from engine.bench.engine_options import add_engine_arguments, chosen_shape, engine_config, shape_name
from engine.config import DtypeName


def run(settings: Settings) -> Outcome:
    """Measures all variants at each number of rows, alternating."""
    dtypes: tuple[DtypeName, ...] = ("float32", "bfloat16")
    shape, vocab_size = shape_name(settings), chosen_shape(settings).vocab_size
    steps = {
        f"Chairlift, {dtype}": chairlift_step(
            engine_config(
                settings,
                max_num_seqs=MAX_ROWS,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                dtype=dtype,
            ),
            vocab_size,
        )
        for dtype in dtypes
    }
    folder = write_shape(shape, settings.scratch)
    steps["transformers, bfloat16"] = transformers_step(folder, vocab_size, torch.bfloat16, threads=settings.threads)
    goals = {"Chairlift, float32": 1.0, "transformers, bfloat16": None}
    return compare_steps("weights-dtype", settings, steps, "Chairlift, bfloat16", goals, shape)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
