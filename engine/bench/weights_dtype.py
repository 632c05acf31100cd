"""Speed of a decode step by --dtype on a CPU, for a checkpoint in bf16.

Claim: with `auto`, weights in bf16 are widened in registers, so that a step reads half the bytes and computes as much;
with `bfloat16` a CPU with AVX512-BF16 multiplies them by inputs in bf16, at twice the rate.

Goal: a step with `auto` takes at most the time of the same step with `float32`, with one row and with 32. Steps with
`bfloat16`, and of transformers in bf16, are printed beside them.

Method: decode-only steps at a context of 128, random weights, on engines that differ in --dtype only; a run's figure is
its median step. transformers computes one token for the same number of rows at the same context, greedily, by
a forward of the model with its own cache, on the same number of threads.
"""

import argparse
import json
from dataclasses import replace

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
from engine.flags import DtypeName


def run(settings: Settings) -> Outcome:
    """Measures all variants at each number of rows, alternating."""
    dtypes: tuple[DtypeName, ...] = ("float32", "auto", "bfloat16")
    shape, vocab_size = shape_name(settings), chosen_shape(settings).vocab_size
    config = engine_config(
        settings, max_num_seqs=MAX_ROWS, max_num_batched_tokens=MAX_BATCHED_TOKENS, max_model_len=MAX_MODEL_LEN
    )
    folder = write_shape(shape, settings.scratch)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "bfloat16"}))
    steps = {
        f"Chairlift, {dtype}": chairlift_step(replace(config, model=str(folder), dtype=dtype), vocab_size)
        for dtype in dtypes
    }
    steps["transformers, bfloat16"] = transformers_step(folder, vocab_size, torch.bfloat16, threads=settings.threads)
    goals = {"Chairlift, float32": 1.0, "Chairlift, bfloat16": None, "transformers, bfloat16": None}
    return compare_steps("weights-dtype", settings, steps, "Chairlift, auto", goals, shape)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
