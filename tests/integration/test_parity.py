"""The whole pair against `generate` of transformers in fp32, for a random checkpoint of every family."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from chairlift import Client
from engine.model.architectures import FAMILIES
from tests.support.engine.checkpoints import ARCHITECTURES, WITH_IMAGES, save_checkpoint
from tests.support.engine.families import STATEFUL_FAMILIES, TRANSFORMERS_FAMILIES, family_config, save_family
from tests.support.engine.float_checkpoints import FloatLayout, quantise_floats
from tests.support.engine.greedy import greedy_answers, random_prompts, save_word_tokenizer
from tests.support.engine.int_checkpoints import Scheme, quantise_checkpoint
from tests.support.engine.mxfp4_checkpoints import quantise_experts
from tests.support.pair import running_pair

PROMPT_LENS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 34, 55, 64, 80, 89, 129, 144)
NUM_TOKENS = 24
TOLERANCE = 1e-4
"""Of a log-probability: fp32 sums of these sizes in another order differ by some 1e-5."""

_WHAT = f"{NUM_TOKENS} greedy tokens of {len(PROMPT_LENS)} prompts, log-probabilities within {TOLERANCE:g}"
COMPARED = f"{{}} | {{}} | {_WHAT}"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

SPECIAL: dict[str, dict[str, Any]] = {  # what a family does that its small default configuration does not
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 24},
    "gemma": {"tie_word_embeddings": False},  # otherwise answers repeat one token, as embeddings are scaled
}


BY_TRANSFORMERS = ("Command R", "DeepSeek-V3", "OLMoE", "LFM2")
"""A sample of what transformers computes; tests/engine/runner/test_transformers_families.py has all families."""

COMPUTED_BY = dict.fromkeys((*ARCHITECTURES, *WITH_IMAGES), "native") | dict.fromkeys(BY_TRANSFORMERS, "transformers")


QUANTISED: dict[str, tuple[str, Scheme | FloatLayout | None]] = {
    "GPTQ, 4 bits in the order of activations": ("qwen2", Scheme("gptq", group_size=16, shuffled=True)),
    "AWQ, 4 bits": ("llama", Scheme("awq")),
    "compressed-tensors, 4 bits": ("mistral", Scheme("packed", symmetric=True)),
    "MXFP4 experts": ("gpt_oss", None),
    "ModelOpt, fp8": ("llama", "modelopt fp8"),
    "ModelOpt, NVFP4": ("qwen3", "modelopt"),
    "ModelOpt, NVFP4 experts": ("qwen3_moe", "modelopt"),
    "compressed-tensors, NVFP4": ("qwen2", "nvfp4"),
}
"""Numbers in which a checkpoint is stored; transformers computes with the same values in float32."""


def save(path: Path, name: str) -> str:
    """Saves a checkpoint; returns its architecture."""
    if name in QUANTISED:
        architecture, scheme = QUANTISED[name]
        sizes = {"hidden_size": 64, "intermediate_size": 128}
        if architecture == "qwen3_moe":
            sizes["moe_intermediate_size"] = 64
        original, twin = path.with_name("original"), path.with_name("twin")
        save_checkpoint(original, architecture, seed=5, dtype="float16", max_shard_size="1GB", **sizes)
        for folder in (path, twin):
            shutil.copytree(original, folder)
        if scheme is None:
            quantise_experts(original, path, twin)
        elif isinstance(scheme, str):
            quantise_floats(original, path, twin, scheme)
        else:
            quantise_checkpoint(original, path, twin, scheme)
    elif COMPUTED_BY[name] == "native":
        save_checkpoint(path, name, seed=5, dtype="float32", max_shard_size="1GB", **SPECIAL.get(name, {}))
    else:
        prefix, fields = {**TRANSFORMERS_FAMILIES, **STATEFUL_FAMILIES}[name]
        save_family(path, family_config(prefix, **{**fields, "vocab_size": 211}), seed=5)
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    return str(architecture)


def test_every_native_family_is_in_the_matrix() -> None:
    assert {model_class for _, model_class, _ in ARCHITECTURES.values()} == set(FAMILIES)


def test_the_table_of_the_page_is_the_matrix(tmp_path: Path) -> None:
    rows = [(save(tmp_path / name, name), computed_by, "float32") for name, computed_by in COMPUTED_BY.items()]
    rows += [(save(tmp_path / numbers / "model", numbers), "native", numbers) for numbers in QUANTISED]
    table = [f"| `{architecture}` | {COMPARED.format(*row)} |" for architecture, *row in rows]
    assert "\n".join(["|---|---|---|---|", *table, ""]) in PAGE.read_text(), "\n".join(table)


@pytest.mark.parametrize(
    "name",
    [name if name == "phi3" else pytest.param(name, marks=pytest.mark.slow) for name in (*COMPUTED_BY, *QUANTISED)],
)
def test_greedy_tokens_and_their_logprobs_equal_those_of_generate(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save(model, name)
    save_word_tokenizer(model)
    prompts = random_prompts(PROMPT_LENS)
    expected = greedy_answers(tmp_path / "twin" if name in QUANTISED else model, prompts, NUM_TOKENS)
    flags = ("--model", str(model), "--kv-cache-memory-bytes", "64M", "--max-num-batched-tokens", "96")
    with running_pair(tmp_path, *flags) as pair, Client(pair.target) as client:

        def answer(prompt: list[int]) -> tuple[list[int], list[float]]:
            result = client.generate(
                token_ids=prompt,
                max_tokens=NUM_TOKENS,
                temperature=0,
                ignore_end_token=True,
                return_token_ids=True,
                top_logprobs=0,
            )
            return list(result.token_ids), list(result.logprobs.chosen)

        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(answer, prompts))
    for (token_ids, logprobs), (their_ids, their_logprobs) in zip(answers, expected, strict=True):
        assert token_ids == their_ids
        assert logprobs == pytest.approx(their_logprobs, abs=TOLERANCE)
