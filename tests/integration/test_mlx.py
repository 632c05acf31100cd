"""Answers to checkpoints that mlx-lm has converted are mlx-lm's own.

CHAIRLIFT_MLX names a Python with mlx-lm: `python -m venv DIR` and `DIR/bin/pip install 'mlx[cpu]' mlx-lm`.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.core.request import SamplingParams
from tests.hang import START_HANG_S
from tests.support.engine.checkpoints import save_checkpoint
from tests.support.engine.greedy import random_prompts
from tests.support.engine.small_engine import answers_with_flags

PYTHON = os.environ.get("CHAIRLIFT_MLX")
ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "engine" / "demo" / "model"
SIZES = {"vocab_size": 3072, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
LAYERS = {  # mlx-lm knows no other pattern, and no windows of Gemma 2
    "gemma2": {"sliding_window": 512},
    "qwen3_moe": {"moe_intermediate_size": 128},
    "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "mlp_only_layers": []},
    "gemma3": {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 5, "full_attention"]},
}
NUM_TOKENS = 24
PROMPTS = random_prompts([3, 17, 40, 9, 28, 5])


@pytest.mark.slow
@pytest.mark.timeout(START_HANG_S)
@pytest.mark.skipif(PYTHON is None, reason="CHAIRLIFT_MLX names no Python with mlx-lm")
@pytest.mark.parametrize(
    ("architecture", "num_bits", "group_size"),
    [
        ("llama", 4, 64),
        *(("qwen3", num_bits, 32) for num_bits in (2, 3, 5, 6, 8)),
        ("qwen2", 4, 64),
        ("mistral", 4, 128),
        ("gemma2", 8, 64),
        ("gemma3", 4, 32),
        ("olmo2", 6, 64),
        ("smollm3", 4, 32),
        *((architecture, 4, 64) for architecture in ("mixtral", "qwen2_moe", "qwen3_moe")),
    ],
)
def test_answers_are_those_of_mlx_lm(tmp_path, architecture, num_bits, group_size):
    original, converted = tmp_path / "original", tmp_path / "converted"
    overrides = SIZES | LAYERS.get(architecture, {})
    save_checkpoint(original, architecture, seed=0, dtype="float32", max_shard_size="1GB", **overrides)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, original)
    config = json.loads((original / "config.json").read_text())
    if "rope_theta" in config["rope_parameters"]:
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where mlx-lm reads it
    if "num_local_experts" in config:
        config["num_experts"] = config["num_local_experts"]
    (original / "config.json").write_text(json.dumps(config))
    script = ROOT / "tests" / "support" / "engine" / "mlx_lm_answers.py"
    command = [PYTHON, str(script), str(original), str(converted), str(num_bits), str(group_size), str(NUM_TOKENS)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run(
        command, input=json.dumps(PROMPTS), capture_output=True, text=True, env=environment, check=False
    )
    assert told.returncode == 0, told.stderr
    params = SamplingParams(seed=0, max_tokens=NUM_TOKENS, temperature=0.0, ignore_end_token=True)
    got = answers_with_flags(converted, PROMPTS, params, "--kv-cache-memory-bytes", "64M", "--kernel-check", "off")
    assert [answer.token_ids for answer in got] == json.loads(told.stdout)
