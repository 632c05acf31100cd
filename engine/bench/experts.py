"""Speed of a decode step of a model with a mixture of experts.

Claim: on a CPU a mixture of experts is part of the recorded step: one row costs what a dense model of the active size
costs, and many rows read each expert once.

Goal: a step takes at most the time of the same model computed by transformers over Chairlift's cache
(--model-impl transformers), and of transformers alone. A dense model with as many active weights is printed beside
them.

Method: decode-only steps at a context of 128 of a Qwen3-MoE, 32 experts of which a token uses 4, random weights in
bf16, as `weights-dtype` measures them; --model-impl transformers has other parameters than these in fp32.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.shapes import Shape, write_tokenizer
from engine.bench.decode_steps import (
    MAX_BATCHED_TOKENS,
    MAX_MODEL_LEN,
    MAX_ROWS,
    chairlift_step,
    compare_steps,
    transformers_step,
)
from engine.config import EngineConfig

_NUM_EXPERTS, _TOP_K = 32, 4
_DENSE = Shape("Qwen3ForCausalLM", "qwen3", 32_000, 1024, 2048, 12, 16, 8, 64)
_QUICK = Shape("Qwen3ForCausalLM", "qwen3", 512, 64, 128, 2, 4, 2, 16)
_BLOCK_SIZE = 16
_OURS = "Chairlift"


def run(settings: Settings) -> Outcome:
    """Measures all systems at each number of rows, alternating."""
    dense = _QUICK if settings.quick else _DENSE
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": _NUM_EXPERTS,
        "num_experts_per_tok": _TOP_K,
        "moe_intermediate_size": dense.intermediate_size // _TOP_K,
        "norm_topk_prob": True,
    }
    mixture = _write(settings.scratch / "mixture", dense, experts)
    ours = EngineConfig(
        model=str(mixture),
        load_format="dummy",
        max_num_seqs=MAX_ROWS,
        max_num_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        block_size=_BLOCK_SIZE,
        num_gpu_blocks_override=MAX_ROWS * -(-MAX_MODEL_LEN // _BLOCK_SIZE),
        threads=settings.threads,
    )
    dense_dir = _write(settings.scratch / "dense", dense, {})
    configs = {
        _OURS: ours,
        "--model-impl transformers": dataclasses.replace(ours, model_impl="transformers"),
        "a dense model of the active size": dataclasses.replace(ours, model=str(dense_dir)),
    }
    steps = {name: chairlift_step(config, dense.vocab_size) for name, config in configs.items()}
    steps["transformers"] = transformers_step(mixture, dense.vocab_size, torch.bfloat16, threads=settings.threads)
    goals = {"--model-impl transformers": 1.0, "transformers": 1.0, "a dense model of the active size": None}
    num_active = dense.num_hidden_layers * 3 * dense.hidden_size * dense.intermediate_size
    sizes = (num_active * _NUM_EXPERTS // _TOP_K, num_active, dense.num_body_weights - num_active)
    note = "weights of experts {}M, active {}M, of attention {}M".format(*(size // 1_000_000 for size in sizes))
    return compare_steps("experts", settings, steps, _OURS, goals, note)


def _write(path: Path, shape: Shape, fields: Mapping[str, object]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape.config() | {"dtype": "bfloat16"} | dict(fields)))
    write_tokenizer(path, shape.vocab_size)
    return path


def add_arguments(_: argparse.ArgumentParser) -> None:
    """Adds no flags."""
