"""The whole pair against `generate` of transformers in fp32, for a random checkpoint of every family."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from chairlift import Client
from engine.model.architectures import FAMILIES
from tests.support.engine.checkpoints import ARCHITECTURES, save_checkpoint
from tests.support.engine.families import TRANSFORMERS_FAMILIES, family_config, save_family
from tests.support.pair import running_pair

PROMPT_LENS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 34, 55, 64, 80, 89, 129, 144)
NUM_TOKENS = 24
TOLERANCE = 1e-4
"""Of a log-probability: fp32 sums of these sizes in another order differ by some 1e-5."""

_WHAT = f"{NUM_TOKENS} greedy tokens of {len(PROMPT_LENS)} prompts, log-probabilities within {TOLERANCE:g}"
COMPARED = f"{{}} | float32 | {_WHAT}"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"

SPECIAL: dict[str, dict[str, Any]] = {  # what a family does that its small default configuration does not
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    "phi3": {"partial_rotary_factor": 0.75, "sliding_window": 24},
}


BY_TRANSFORMERS = ("Command R", "DeepSeek-V3", "OLMoE")
"""A sample of what transformers computes; tests/engine/runner/test_transformers_families.py has all families."""

COMPUTED_BY = dict.fromkeys(ARCHITECTURES, "native") | dict.fromkeys(BY_TRANSFORMERS, "transformers")


def save(path: Path, name: str) -> str:
    """Saves a checkpoint; returns its architecture."""
    if COMPUTED_BY[name] == "native":
        save_checkpoint(path, name, seed=5, dtype="float32", max_shard_size="1GB", **SPECIAL.get(name, {}))
    else:
        prefix, fields = TRANSFORMERS_FAMILIES[name]
        save_family(path, family_config(prefix, **{**fields, "vocab_size": 211}), seed=5)
    (architecture,) = json.loads((path / "config.json").read_text())["architectures"]
    return str(architecture)


def test_every_native_family_is_in_the_matrix() -> None:
    assert {model_class for _, model_class, _ in ARCHITECTURES.values()} == set(FAMILIES)


def test_the_table_of_the_page_is_the_matrix(tmp_path: Path) -> None:
    rows = [(save(tmp_path / name, name), computed_by) for name, computed_by in COMPUTED_BY.items()]
    table = [f"| `{architecture}` | {COMPARED.format(computed_by)} |" for architecture, computed_by in rows]
    assert "\n".join(["|---|---|---|---|", *table, ""]) in PAGE.read_text(), "\n".join(table)


@pytest.mark.parametrize(
    "name", [name if name == "phi3" else pytest.param(name, marks=pytest.mark.slow) for name in COMPUTED_BY]
)
def test_greedy_tokens_and_their_logprobs_equal_those_of_generate(name: str, tmp_path: Path) -> None:
    model = tmp_path / name
    save(model, name)
    vocabulary = {f"t{token_id}": token_id for token_id in range(211)}
    Tokenizer(WordLevel(vocabulary, unk_token="t0")).save(str(model / "tokenizer.json"))
    prompts, expected = reference(model)
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


def reference(model: Path) -> tuple[list[list[int]], list[tuple[list[int], list[float]]]]:
    """Returns prompts, and what transformers answers to each alone: token ids and their log-probabilities."""
    import torch
    import transformers

    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    oracle.generation_config.eos_token_id = oracle.config.eos_token_id = None
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 211, (length,), generator=generator) for length in PROMPT_LENS]
    expected = []
    for prompt in prompts:
        out = oracle.generate(
            prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        token_ids = out.sequences[0, len(prompt) :]
        logprobs = torch.cat(out.logits).log_softmax(-1).gather(1, token_ids[:, None])[:, 0]
        expected.append((token_ids.tolist(), logprobs.tolist()))
    distinct = {token_id for token_ids, _ in expected for token_id in token_ids}
    assert len(distinct) > 20, "degenerate answers compare little"
    return [prompt.tolist() for prompt in prompts], expected
